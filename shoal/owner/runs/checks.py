"""Checks of a run against its devices: refuse one that can't change any model, warn about one that may not find clusters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from aggregator.strategies.base import StrategySettings
from aggregator.strategies.drawing import drawn
from shoal.errors import ConfigError
from shoal.membership.roster import has_expired
from shoal.protocol.documents import Roster, RunPlan
from shoal.util.console import counted, day

LOWER_HINT: Final = "lower min_contributors, at the price that devices can read means of so few; or add devices first"
KEEPS: Final = (
    "a cluster of fewer devices than min_contributors keeps its starting model; with a lower one devices can read means of "
    "so few"
)

EXPIRES_SOON_S: Final = 30 * 24 * 3600
RENEW: Final = "shoal-fleet renew, then shoal-fleet publish"


def check_roster(roster: Roster, now_s: int) -> None:
    """Check that the roster has not expired: devices ignore runs under an expired one.

    Raises:
        ConfigError: the roster has expired.
    """
    if has_expired(roster, now_s):
        raise ConfigError(
            f"the roster expired on {day(roster.expires_at_s)}: no device would follow the run", hint=RENEW
        )


def roster_doubts(roster: Roster, now_s: int) -> Iterator[str]:
    """Yield a warning if the roster expires within EXPIRES_SOON_S of ``now_s``."""
    if has_expired(roster, now_s + EXPIRES_SOON_S):
        yield f"the roster expires on {day(roster.expires_at_s)}, and ends the run then: {RENEW}"


def check_devices(plan: RunPlan, devices: tuple[str, ...], settings: StrategySettings) -> None:
    """Check that a run with these devices can change a model.

    Args:
        plan: the run's plan.
        devices: those that may take part, at least one.
        settings: the algorithm's.

    Raises:
        ConfigError: no round has ``min_contributors`` devices, or there are fewer devices than clusters.
    """
    count, least = len(devices), plan.recipe.min_contributors
    per_round = len(drawn(plan, 1, devices))
    if least > count:
        raise ConfigError(
            f"min_contributors {least} wants {counted(least, 'device')} in each mean, and there are {count}: "
            "no model would ever change",
            hint=LOWER_HINT,
        )
    if least > per_round:
        raise ConfigError(
            f"participation {plan.recipe.participation:g} draws {per_round} of {counted(count, 'device')} for a round, and "
            f"min_contributors wants {least} in each mean: no model would ever change",
            hint=f"raise participation; or {LOWER_HINT}",
        )
    if settings.clusters > count:
        raise ConfigError(
            f"{settings.clusters_setting} is {settings.clusters}, and there are {counted(count, 'device')}",
            hint=f"lower {settings.clusters_setting}, or add devices first",
        )


def doubts(plan: RunPlan, devices: tuple[str, ...], settings: StrategySettings) -> Iterator[str]:
    """Yield reasons why a run that `check_devices` accepts may not find clusters."""
    per_round, least = len(drawn(plan, 1, devices)), plan.recipe.min_contributors
    taking_part = counted(per_round, "device") + ("" if per_round == len(devices) else " a round")
    # Where a mean needs more than one device, clusters of a given number take turns.
    at_hand, shared = (len(devices), counted(len(devices), "device")) if least > 1 else (per_round, taking_part)
    if at_hand / settings.clusters < least:
        clusters = counted(settings.clusters, "cluster")
        yield f"{shared} for {clusters} are fewer than min_contributors {least} for each: {KEEPS}"
    if settings.splits and per_round < 2 * least:
        yield (
            f"{plan.recipe.algorithm.upper()} can't split {taking_part}: each side needs min_contributors, {least} of them; "
            f"{KEEPS}"
        )
    if plan.capabilities.scale and plan.recipe.robust != "off":
        yield (
            f"eta_g computes the lengths of models from plain means: robust {plan.recipe.robust} has no effect in this run, "
            "and false updates count in full"
        )
