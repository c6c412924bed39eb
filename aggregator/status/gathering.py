"""Read the facts of an aggregator's directory from any process, while the daemon runs or not."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from aggregator.rounds.orders import WORDS, Order
from aggregator.rounds.phases import RunPhase
from aggregator.status.live_file import read_live
from aggregator.status.record import Facts, FleetStatus, StoredRun, build
from shoal.address import BrokerAddress
from shoal.errors import ConfigError
from shoal.util.files import free_bytes
from shoal.util.locks import in_use

if TYPE_CHECKING:
    from aggregator.membership import AggregatorMembership
    from shoal.protocol.documents import RunPlan


def fleet_status(member: AggregatorMembership, runs: Sequence[StoredRun], now_s: int | None = None) -> FleetStatus:
    """Return the state of a fleet.

    Args:
        member: the aggregator's membership; its directory has the lock and the daemon's facts.
        runs: the readable runs in order of their numbers.
        now_s: unix seconds; None for now.
    """
    running, live = in_use(member.directory), read_live(member.directory)
    open_run = None if live is None or not running else live.run
    served = None if open_run is None or open_run.phase == RunPhase.FINISHED.value else open_run.run
    facts = Facts(
        fleet=member.fleet,
        running=running,
        live=live,
        broker=_without_user(member.broker),
        active=member.roster.active(),
        revoked=tuple(member.roster.revoked),
        run=_chosen(runs, served),
        disk_free_bytes=free_bytes_of(member.directory),
        now_s=int(time.time()) if now_s is None else now_s,
    )
    return build(facts)


def stored_run(
    plan: RunPlan, records: Sequence[Mapping[str, Any]], order: Order = Order.GO, *, void: bool = False
) -> StoredRun:
    """Return a run as its plan, the records of its closed rounds, oldest first, and the owner's order have it.

    ``void`` is `signed_runs.is_void`: the run was stopped before its first round.
    """
    last = records[-1] if records else None
    clusters: dict[str, int] = next((r["clusters"] for r in reversed(records) if r["clusters"]), {})
    tests: dict[str, tuple[int, int]] = next(
        (r["device_accuracy"] for r in reversed(records) if r["device_accuracy"]), {}
    )
    losses = {} if last is None else last.get("cluster_losses", {})
    return StoredRun(
        run=plan.run,
        algorithm=plan.recipe.algorithm,
        rounds=plan.recipe.rounds,
        closed=next((r["round"] for r in reversed(records) if not r["final"]), 0),
        finished=void or bool(last and last["final"]),
        clusters=clusters,
        tests=tests,
        order=WORDS[order],
        wire=plan.wire,
        losses={int(cluster): loss for cluster, loss in losses.items()},  # JSON has text where the record has numbers
    )


def free_bytes_of(directory: Path) -> int | None:
    """Return the free space for a directory in bytes; None if it can't be read."""
    try:
        return free_bytes(directory)
    except OSError:
        return None


def _chosen(runs: Sequence[StoredRun], served: int | None) -> StoredRun | None:
    """Return the run that is served; without one the first unfinished run, or the last run."""
    ordered = [
        *(run for run in runs if run.run == served),
        *(run for run in runs if not run.finished),
        *reversed(runs),
    ]
    return ordered[0] if ordered else None


def _without_user(url: str) -> str:
    try:
        return str(BrokerAddress.parse(url))
    except ConfigError:
        return "an address that is not valid"
