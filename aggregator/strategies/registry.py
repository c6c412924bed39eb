"""Registry of the algorithms by name. A new algorithm needs one line in `STRATEGIES`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from aggregator.numerics.backend import Backend
from aggregator.strategies.base import Average, Strategy, read_settings
from aggregator.strategies.cfl.strategy import Cfl
from aggregator.strategies.fedavg import FedAvg
from aggregator.strategies.fedgroup.prox import FedGrouProx
from aggregator.strategies.fedgroup.strategy import FedGroup
from aggregator.strategies.fedprox import FedProx
from aggregator.strategies.fesem import Fesem
from aggregator.strategies.ifca.strategy import Ifca
from aggregator.strategies.local import Local
from aggregator.strategies.one_shot import OneShot
from aggregator.strategies.robust import RobustMean
from aggregator.strategies.settings import StrategySettings
from aggregator.strategies.statistics import Standardised
from shoal import limits
from shoal.errors import ConfigError
from shoal.protocol.documents import RunPlan

STRATEGIES: Final[dict[str, Any]] = {
    s.name: s for s in (FedAvg, FedProx, Local, Ifca, OneShot, Cfl, FedGroup, FedGrouProx, Fesem)
}


def make_strategy(run: RunPlan, backend: Backend | None = None, average: Average | None = None) -> Strategy:
    """Return the strategy of a run plan.

    Args:
        run: the owner's plan.
        backend: computes similarities; numpy when absent.
        average: forms means of contributions; `RobustMean` if None.

    Raises:
        ConfigError: no such algorithm, a mask mode in which it does not work, or a setting that it refuses.
    """
    average = average or RobustMean(run, backend)
    strategy = build_strategy(find_strategy(run.algorithm), run.without_statistics, backend, average)
    return cast(Strategy, Standardised(strategy, run, average)) if run.statistics else strategy


def build_strategy(
    kind: type[Strategy], run: RunPlan, backend: Backend | None = None, average: Average | None = None
) -> Strategy:
    """Return a strategy of class ``kind``, in `STRATEGIES` or not: ``kind(run, backend, average)``.

    Raises:
        ConfigError: it does not work in the run's mask mode, or refuses a setting.
    """
    make: Callable[..., Strategy] = kind
    strategy = make(run, backend, average or RobustMean(run, backend))
    if run.mode not in strategy.modes:
        raise ConfigError(
            f"{strategy.name} does not work in mask mode {run.mode}",
            hint=f"it works in: {', '.join(sorted(strategy.modes))}",
        )
    return strategy


def models_needed(run: RunPlan) -> int:
    """Return how many model ids the run may name at most."""
    models = int(find_strategy(run.algorithm).models(run.without_statistics))
    return min(models + 1, limits.MAX_MODELS) if run.statistics else models


def settings_of(algorithm: str, given: Mapping[str, str]) -> StrategySettings:
    """Return the settings of an algorithm.

    Args:
        algorithm: its name.
        given: values as text by name, as in ``RunPlan.settings``.

    Raises:
        ConfigError: no such algorithm, or a setting that it does not have or refuses.
    """
    settings: StrategySettings = read_settings(find_strategy(algorithm).settings_type, algorithm, given)
    return settings


def plan_settings(run: RunPlan) -> StrategySettings:
    """Return the settings of a run plan's algorithm; raise ConfigError as `settings_of`."""
    return settings_of(run.algorithm, {s.name: s.value for s in run.without_statistics.settings})


def find_strategy(algorithm: str) -> Any:
    """Return the class called ``algorithm``.

    Raises:
        ConfigError: no class has that name.
    """
    if algorithm not in STRATEGIES:
        raise ConfigError(f"no algorithm {algorithm!r}", hint=f"there are {', '.join(sorted(STRATEGIES))}")
    return STRATEGIES[algorithm]
