"""Checks of a run against the roster: refuse a run that can't change any model, warn about one that may not find clusters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from aggregator.strategies.drawing import drawn
from aggregator.strategies.registry import plan_settings
from shoal.errors import ConfigError
from shoal.membership.roster import has_expired
from shoal.protocol.documents import Roster, RunPlan
from shoal.util.console import counted
from shoal.util.times import day

LOWER_HINT: Final = (
    "--min-contributors N lowers it, at the price that devices can read means of so few; or add devices first"
)
KEEPS: Final = (
    "a cluster of fewer devices than --min-contributors keeps its starting model; --min-contributors N lowers it, at "
    "the price that devices can read means of so few"
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


def check_devices(plan: RunPlan, devices: tuple[str, ...]) -> None:
    """Check that a run with these devices can change a model.

    Args:
        plan: the run's plan.
        devices: the roster's devices that are not revoked, at least one.

    Raises:
        ConfigError: no round has ``min_contributors`` devices, or there are fewer devices than clusters.
    """
    count, least = len(devices), plan.min_contributors
    if least > count:
        raise ConfigError(
            f"--min-contributors {least} wants {counted(least, 'device')} in each mean, and the roster has {count}: "
            "no model would ever change",
            hint=LOWER_HINT,
        )
    per_round = len(drawn(plan, 1, devices))
    if least > per_round:
        raise ConfigError(
            f"--participation {plan.participation:g} draws {per_round} of {counted(count, 'device')} for a round, and "
            f"--min-contributors wants {least} in each mean: no model would ever change",
            hint=f"raise --participation; or {LOWER_HINT}",
        )
    name, clusters = _clusters(plan)
    if clusters > count:
        raise ConfigError(
            f"{name}={clusters} wants {clusters} clusters, and the roster has {counted(count, 'device')}",
            hint=f"lower it with --set {name}=N, or add devices first",
        )


def doubts(plan: RunPlan, devices: tuple[str, ...]) -> Iterator[str]:
    """Yield reasons why a run that `check_devices` accepts may not find clusters."""
    per_round, least = len(drawn(plan, 1, devices)), plan.min_contributors
    taking_part = counted(per_round, "device") + ("" if per_round == len(devices) else " a round")
    _, clusters = _clusters(plan)
    # Where a mean needs more than one device, clusters of a given number take turns.
    at_hand, shared = (len(devices), counted(len(devices), "device")) if least > 1 else (per_round, taking_part)
    if at_hand / clusters < least:
        yield (
            f"{shared} for {counted(clusters, 'cluster')} are fewer than --min-contributors {least} for each: {KEEPS}"
        )
    if plan_settings(plan).splits and per_round < 2 * least:
        yield (
            f"{plan.algorithm.upper()} can't split {taking_part}: each side needs --min-contributors, {least} of them; "
            f"{KEEPS}"
        )
    if plan.capabilities.scale and plan.robust != "off":
        yield (
            f"eta_g computes the lengths of models from plain means: --robust {plan.robust} has no effect in this run, and "
            "false updates count in full"
        )


def _clusters(plan: RunPlan) -> tuple[str, int]:
    """Return the setting that fixes the number of clusters, and the number: ("", 1) if there is no such setting."""
    settings = plan_settings(plan)
    return settings.clusters_setting, settings.clusters
