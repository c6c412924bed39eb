"""The differences between the papers' runs and a fleet's run, in one place.

The papers average the updates of any number of devices, one included, and limit neither a device's weight nor the norm of its
update. Their tables are made without a mask unless ``--mask`` names one, which changes no result. Local training and the share
of the devices in a round are each experiment's own.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from shoal.protocol.recipe import DEFAULTS
from shoal.simulation.engine.fleet import sim_options
from shoal.simulation.engine.records import UNLIMITED_NORM, SimOptions

PAPER: Final[Mapping[str, Any]] = MappingProxyType(
    {"min_contributors": 1, "weight_cap": 0.0, "norm_limit": UNLIMITED_NORM, "norm_screen": False, "robust": "off"}
)
"""Options of the papers' runs that are not a fleet's defaults."""
PAPER_TEXT: Final = f"min_contributors {PAPER['min_contributors']}, no weight cap, no norm limits, robust off"
"""The same as text for a table."""


def paper_options(**fields: Any) -> SimOptions:
    """Return the options of a paper's run: `PAPER`, and the ``fields`` of `SimOptions` that the experiment sets."""
    return sim_options(**{**PAPER, **fields})


def unlike_a_fleet(parameters: Mapping[str, Any]) -> str:
    """Return the options of a paper's run that are not a fleet's defaults, as text for the row of a table.

    Args:
        parameters: of the result; ``mask`` and ``weighting`` are read.
    """
    texts = [PAPER_TEXT]
    if parameters.get("weighting", DEFAULTS.weighting) != DEFAULTS.weighting:
        texts.append(f"weighting {parameters['weighting']}")
    mask = parameters.get("mask", "none")
    if mask != DEFAULTS.mode:
        texts.append("no mask" if mask in ("none", "nothing leaves a device") else f"mask {mask}")
    return ", ".join(texts)
