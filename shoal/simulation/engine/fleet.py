"""The defaults of a fleet's run as options of a simulated run, so that both are set in one place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from aggregator.strategies.local import Local
from shoal.owner.runs.plan import RunOptions
from shoal.protocol.documents import LocalSettings
from shoal.simulation.engine.records import SimOptions
from shoal.task.manifest import LocalTraining


def fleet_run(strategy: str, settings: Mapping[str, str], **others: Any) -> RunOptions:
    """Return an owner's choices for a run that names the strategy and its settings only; ``others`` override the defaults."""
    # Local training forms no means, and its strategy refuses any other number.
    least = {"min_contributors": 1} if strategy == Local.name else {}
    return RunOptions(strategy, settings, **{**others, **least})


def fleet_options(
    fleet: RunOptions,
    *,
    rounds: int,
    local: LocalTraining | LocalSettings,
    seed: int,
    participation: float = 1.0,
    **others: Any,
) -> SimOptions:
    """Return the options of a run that has a fleet's weights, limits and smallest mean, and counts every round.

    Args:
        fleet: from `fleet_run`, of which weighting, weight_cap, robust, norm_limit, min_contributors, mode
            and precisions are taken.
        rounds: number of rounds.
        local: recipe of local training.
        seed: as in `SimOptions`.
        participation: as in `SimOptions`.
        others: further options of `SimOptions`, which override the fleet's.
    """
    chosen: dict[str, Any] = {
        "mask": fleet.mode,
        "weighting": fleet.weighting,
        "weight_cap": fleet.weight_cap,
        "robust": fleet.robust,
        "norm_limit": fleet.norm_limit,
        "min_contributors": fleet.min_contributors,
        "precision_up": fleet.precision_up,
        "precision_down": fleet.precision_down,
        "count": "all",
    }
    return SimOptions(rounds=rounds, local=local, seed=seed, participation=participation, **{**chosen, **others})
