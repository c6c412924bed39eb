"""The algorithms by name."""

from __future__ import annotations

from typing import Any, Final

from aggregator.numerics.backend import Backend
from aggregator.strategies.base import Average, Strategy, mean_update
from aggregator.strategies.cfl.state import CflSettings
from aggregator.strategies.cfl.strategy import Cfl
from aggregator.strategies.fedavg import FedAvg, FedAvgSettings
from aggregator.strategies.fedgroup.prox import FedGrouProx
from aggregator.strategies.fedgroup.state import FedGroupSettings
from aggregator.strategies.fedgroup.strategy import FedGroup
from aggregator.strategies.fedprox import FedProx
from aggregator.strategies.fesem import Fesem, FesemSettings
from aggregator.strategies.ifca.state import IfcaSettings
from aggregator.strategies.ifca.strategy import Ifca
from aggregator.strategies.local import Local, LocalSettings
from aggregator.strategies.one_shot import OneShot, OneShotSettings
from shoal.errors import ConfigError
from shoal.protocol.documents import RunPlan

STRATEGIES: Final[dict[str, Any]] = {
    s.name: s for s in (FedAvg, FedProx, Local, Ifca, OneShot, Cfl, FedGroup, FedGrouProx, Fesem)
}

SETTINGS: Final[dict[str, type[Any]]] = {
    FedAvg.name: FedAvgSettings,
    FedProx.name: FedAvgSettings,
    Local.name: LocalSettings,
    Ifca.name: IfcaSettings,
    OneShot.name: OneShotSettings,
    Cfl.name: CflSettings,
    FedGroup.name: FedGroupSettings,
    FedGrouProx.name: FedGroupSettings,
    Fesem.name: FesemSettings,
}
"""What `RunPlan.settings` may hold for each, as frozen dataclasses whose docstrings say what it means."""


def make_strategy(run: RunPlan, backend: Backend | None = None, average: Average = mean_update) -> Strategy:
    """Return the strategy of a run plan.

    Args:
        run: the owner's plan.
        backend: computes similarities; numpy when absent.
        average: forms means of contributions.

    Raises:
        ConfigError: no such algorithm, or a setting that it refuses.
    """
    strategy: Strategy = _find(run.algorithm)(run, backend, average)
    return strategy


def models_needed(run: RunPlan) -> int:
    """Return how many model ids the run may name at most."""
    return int(_find(run.algorithm).models(run))


def _find(algorithm: str) -> Any:
    if algorithm not in STRATEGIES:
        raise ConfigError(f"no algorithm {algorithm!r}", hint=f"there are {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[algorithm]
