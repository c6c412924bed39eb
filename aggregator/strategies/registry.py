"""Registry of the algorithms by name: one line in `STRATEGIES` for ours, an entry point for those of other packages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from aggregator.numerics.backend import Backend
from aggregator.numerics.parted import MOST_COMPARED
from aggregator.strategies.base import Average, Strategy, StrategySettings, read_settings, require_origins
from aggregator.strategies.cfl.strategy import Cfl
from aggregator.strategies.drawing import budget
from aggregator.strategies.fedavg import FedAvg, FedProx
from aggregator.strategies.fedgroup.strategy import FedGroup, FedGrouProx
from aggregator.strategies.fesem import Fesem
from aggregator.strategies.ifca.strategy import Ifca
from aggregator.strategies.local import Local
from aggregator.strategies.one_shot import OneShot
from aggregator.strategies.robust import RobustMean
from aggregator.strategies.statistics import Standardised
from shoal import limits
from shoal.errors import ConfigError, UsageError
from shoal.protocol.documents import RunPlan
from shoal.util.extensions import STRATEGIES_GROUP, extension_names, load_extension

STRATEGIES: Final[dict[str, Any]] = {
    s.name: s for s in (FedAvg, FedProx, Local, Ifca, OneShot, Cfl, FedGroup, FedGrouProx, Fesem)
}

MEMBERS: Final = ("name", "settings_type", "modes", "init", "plan", "close", "final", "models_of")
"""Attributes that every strategy needs."""


class TooManyComparedError(ConfigError):
    """A round would compare more updates with each other than an aggregator with workers can."""


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
    strategy = build_strategy(find_strategy(run.recipe.algorithm), run.without_statistics, backend, average)
    return cast(Strategy, Standardised(strategy, run, average)) if run.statistics else strategy


def build_strategy(
    kind: type[Strategy], run: RunPlan, backend: Backend | None = None, average: Average | None = None
) -> Strategy:
    """Return a strategy of class ``kind``, in `STRATEGIES` or not: ``kind(run, backend, average)``.

    Raises:
        ConfigError: it does not work in the run's mask mode, begins with another number of models, or refuses a setting.
    """
    make: Callable[..., Strategy] = kind
    require_origins(run, read_settings(kind.settings_type, run.recipe.algorithm, run.recipe.values))
    strategy = make(run, backend, average or RobustMean(run, backend))
    if run.recipe.mode not in strategy.modes:
        raise ConfigError(
            f"{strategy.name} does not work in mask mode {run.recipe.mode}",
            hint=f"it works in: {', '.join(sorted(strategy.modes))}",
        )
    return strategy


def models_needed(run: RunPlan) -> int:
    """Return how many model ids the run may name at most: with statistics those of the fleet, and of each model."""
    models = int(find_strategy(run.recipe.algorithm).models(run.without_statistics))
    return min(2 * models + 1, limits.MAX_MODELS) if run.statistics else models


def check_compared(run: RunPlan, devices: int) -> None:
    """Check that the coordinator of a run's workers can hold the products of all updates that a round compares.

    Args:
        run: the plan; one without workers has no such bound.
        devices: of the roster.

    Raises:
        TooManyComparedError: the products of that many updates exceed `aggregator.numerics.parted.MOST_GRAM_BYTES`.
    """
    if not run.workers:
        return
    settings = plan_settings(run)
    count = settings.compared(budget(run, devices), devices)
    if count <= MOST_COMPARED:
        return
    ways = ["take fedavg, fedprox, ifca, fesem or local, which compare no updates with each other"]
    if settings.compared(MOST_COMPARED, devices) <= MOST_COMPARED:
        # Rounded down, so that the draw, which is rounded to the nearest number, stays below the bound.
        ways.insert(0, f"give --participation {math.floor(1000 * MOST_COMPARED / devices) / 1000:g} or less")
    if settings.clusters_setting and settings.clusters > 1:
        ways.insert(0, f"give --set {settings.clusters_setting}=auto, which compares a sample")
    raise TooManyComparedError(
        f"{run.recipe.algorithm} would compare {count} updates with each other in a round, and an aggregator with workers "
        f"compares {MOST_COMPARED} at most",
        hint="; or ".join(ways),
    )


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
    return settings_of(run.recipe.algorithm, run.without_statistics.recipe.values)


def find_strategy(algorithm: str) -> Any:
    """Return the class called ``algorithm``: one of `STRATEGIES`, or of an installed package (`shoal.util.extensions`).

    Raises:
        ConfigError: no class has that name.
        UsageError: what a package calls so is no strategy.
    """
    if algorithm in STRATEGIES:
        return STRATEGIES[algorithm]
    found = load_extension(STRATEGIES_GROUP, algorithm)
    if found is None:
        raise ConfigError(f"no algorithm {algorithm!r}", hint=f"there are {', '.join(sorted(strategy_names()))}")
    check_members(found)
    if found.name != algorithm:
        raise ConfigError(
            f"the strategy installed as {algorithm!r} calls itself {found.name!r}", hint="give both the same name"
        )
    return found


def strategy_names() -> list[str]:
    """Return the names of the strategies here and of those that packages add, in this order."""
    return [*STRATEGIES, *(name for name in extension_names(STRATEGIES_GROUP) if name not in STRATEGIES)]


def check_members(kind: Any) -> None:
    """Check that ``kind`` is a class with the methods of a strategy.

    Raises:
        UsageError: it is not.
    """
    if not isinstance(kind, type):
        raise UsageError(f"a strategy is a class, not {kind!r}")
    if missing := [member for member in MEMBERS if not hasattr(kind, member)]:
        raise UsageError(
            f"strategy {kind.__name__} has no {missing[0]!r}", hint="see shoal.Strategy; shoal.FedAvg has all of it"
        )
