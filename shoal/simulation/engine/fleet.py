"""Recipes of simulated runs, and of a fleet's run that is simulated."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from aggregator.strategies.local import Local
from shoal.protocol.recipe import LocalTraining, Recipe, as_settings
from shoal.simulation.engine.records import SimOptions

SIMULATED: Final = Recipe(mode="none", seed=0, local=LocalTraining())
"""A simulated run's recipe unless another is given: a fleet's without a mask, which changes no result, with a seed."""


def sim_options(recipe: Recipe = SIMULATED, **fields: Any) -> SimOptions:
    """Return options with the given ``fields`` of `SimOptions` and, in place of those of ``recipe``, of `Recipe`."""
    own = {name: fields.pop(name) for name in SimOptions.__slots__ if name in fields}
    return SimOptions(dataclasses.replace(recipe, **fields), **own)


def fleet_run(strategy: str, settings: Mapping[str, Any], **others: Any) -> Recipe:
    """Return an owner's choices for a run that names the strategy and its settings only; ``others`` override the defaults."""
    # Local training forms no means, and its strategy refuses any other number.
    least = {"min_contributors": 1} if strategy == Local.name else {}
    return Recipe(strategy, as_settings(settings), **{**others, **least})


def fleet_options(fleet: Recipe, **fields: Any) -> SimOptions:
    """Return options by a fleet's recipe and the given ``fields`` (`sim_options`), which count every round."""
    return sim_options(fleet, **{"count": "all", **fields})
