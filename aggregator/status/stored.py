"""The status of an aggregator from its files: what `shoal-aggregator status` prints, as data and as text.

Any process may read them, while the daemon runs or not.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from aggregator.membership import AggregatorMembership
from aggregator.rounds.standstill import NAMES_SHOWN
from aggregator.rounds.state import WORDS, Order, RunPhase
from aggregator.run_log import (
    CAPPED_HINT,
    OUT_OF_STEP_HINT,
    REFUSED_NORM_HINT,
    STANDS_APART_HINT,
    cluster_sizes,
    declined_by,
    limited_by,
    too_small,
)
from aggregator.status import text
from aggregator.status.facts import RunStatus
from aggregator.status.live_file import read_live
from aggregator.status.record import REVOKED, SILENT_S, Facts, FleetStatus, StoredRun, build
from aggregator.storage.signed_runs import RunFiles, check_assignment, directory_of, is_finished, is_void, read_orders
from aggregator.storage.store import read_records, readable
from aggregator.strategies.base import STANDS_APART
from shoal.address import in_words
from shoal.errors import IntegrityError, NotReadyError, ShoalError
from shoal.protocol.documents import RunPlan
from shoal.util.console import mask_words, second
from shoal.util.files import free_bytes_of, in_use


def require_health(directory: Path, fleet: FleetStatus) -> None:
    """Check that the aggregator in ``directory`` serves its fleet.

    Raises:
        NotReadyError: the program does not run, is not connected, or its loop has shown no sign of life for SILENT_S.
    """
    if not fleet.running:
        raise NotReadyError("the aggregator's program does not run", hint="shoal-aggregator serve DIRECTORY")
    if not fleet.connected:
        raise NotReadyError(f"not connected to {fleet.broker}", hint="shoal-aggregator doctor DIRECTORY")
    live = read_live(directory)
    if live is not None and time.time() - live.alive_at_s > SILENT_S:
        raise NotReadyError(
            f"no sign of life since {second(live.alive_at_s)}",
            hint="a long computation, a stopped process or a full disk: read its log",
        )


def document(directory: Path) -> tuple[dict[str, Any], FleetStatus]:
    """Return the data of ``status --json``, and the record in it."""
    member = AggregatorMembership(directory)
    refused: dict[str, str] = {}
    live = read_live(directory) if in_use(directory) else None
    served = None if live is None or live.ended_at_s is not None else live.run
    read = [_standing(member, run.plan, served) for run in RunFiles(member, refused.__setitem__).all()]
    runs = [figures for figures, _ in read]
    fleet = fleet_status(member, [stored for _, stored in read if stored is not None])
    return {**fleet.document(), "serving": fleet.running, "runs": runs, "refused": refused}, fleet


def lines(document: dict[str, Any], fleet: FleetStatus) -> Iterator[str]:
    """Yield a document of `document` and its record as text."""
    runs, members = document["runs"], [d for d in fleet.devices if d.reason != REVOKED]
    yield f"fleet {fleet.fleet}, devices: {len(members)}, runs: {len(runs)}, {text.state_words(fleet)}"
    yield from text.problem_lines(fleet)
    yield from text.worker_lines(fleet)
    yield from text.device_lines(fleet)
    yield from text.version_lines(fleet)
    for name, reason in document["refused"].items():
        yield f"{name} is no run of this fleet: {reason}"
    for r in runs:
        now = "" if fleet.run is None or fleet.run.run != r["run"] else text.round_line(fleet.run)
        yield from _run_lines(r, now)
    yield from text.cluster_lines(fleet)


def _run_lines(r: dict[str, Any], now: str) -> list[str]:
    """Return a run's lines; ``now`` is the line about its open round, empty if it has none."""
    head = f"run {r['run']}: {r['algorithm']}, mask {mask_words(r['mode'])}"
    if r["damage"]:
        return [f"{head}, {r['damage']}"]
    state = "finished" if r["finished"] else f"{r['closed']} of {r['rounds']} rounds closed"
    state += f", {r['order']}" if r["order"] else ""
    accuracy = f", accuracy {100 * r['accuracy']:.1f}%" if r["accuracy"] is not None else ""
    lines = [f"{head}, {state}{_clusters(r)}{accuracy}{_obstacle(r)}"]
    limited = limited_by(r["capped"], r["refused_norm"], r["out_of_step"], r["stands_apart"])
    if limited:
        hints = {
            REFUSED_NORM_HINT: r["refused_norm"],
            CAPPED_HINT: r["capped"],
            OUT_OF_STEP_HINT: r["out_of_step"],
            STANDS_APART_HINT: r["stands_apart"],
        }
        lines.append(f"run {r['run']} limits: {limited}")
        lines += [f"  hint: {hint}" for hint, devices in hints.items() if devices]
    if refused := r["split_refused"]:
        lines.append(
            f"run {r['run']} split of cluster {refused['cluster']} refused in round {refused['round']}: {refused['reason']}"
        )
    for still in r["still"][:NAMES_SHOWN]:
        rounds = f"for {still['rounds']} rounds"
        lines.append(f"run {r['run']} stands still: cluster {still['cluster']} {rounds}: {still['reason']}")
        lines.append(f"  hint: {still['hint']}")
    if len(r["still"]) > NAMES_SHOWN:
        lines.append(f"run {r['run']} stands still: {len(r['still']) - NAMES_SHOWN} more clusters")
    return [*lines, now] if now else lines


def _clusters(r: dict[str, Any]) -> str:
    sizes = f", clusters: {'+'.join(map(str, r['cluster_sizes']))} devices" if r["cluster_sizes"] else ""
    found = r["groups"]
    return f"{sizes}, groups found: {found['k']} (silhouette {found['silhouette']:.2f})" if found else sizes


def _obstacle(r: dict[str, Any]) -> str:

    if r["older"]:
        return f"; {r['older']}"
    told = [f"too small to be averaged: {r['too_small']}"] if r["too_small"] else []
    return "".join(f"; {reason}" for reason in (declined_by(r["declined"]), *told) if reason)


def _standing(
    member: AggregatorMembership, plan: RunPlan, served: RunStatus | None
) -> tuple[dict[str, Any], StoredRun | None]:
    """Return the status of a run by its last closed round and by the one that is served, and the same for the fleet's record.

    If the run's directory can't be read, "damage" says why, and the second is None; the second is also None for a run that can
    no longer be served.
    """
    order = read_orders(member.directory).of(plan.run_id)
    run: dict[str, Any] = {
        "run": plan.run,
        "algorithm": plan.recipe.algorithm,
        "mode": plan.recipe.mode,
        "rounds": plan.recipe.rounds,
    }
    run["order"] = WORDS[order]
    run["older"] = _older(member, plan)
    directory = directory_of(member, plan.run)
    known = None if served is None or served.run != plan.run else served
    run["waiting"], run["shortage"] = ("", None) if known is None else (known.line, known.lacks)
    try:
        records = read_records(directory)
        with readable(directory):
            void = is_void(member, plan, order)
            stored = None if run["older"] else stored_run(plan, records, order, void=void)
            return {**run, **_figures(records, plan), "damage": ""}, stored
    except IntegrityError as error:
        return {**run, **_figures([], plan), "damage": f"{error} ({error.hint})"}, None


def _older(member: AggregatorMembership, plan: RunPlan) -> str:
    """Return why an unfinished run can no longer be served; empty if it can be, or is finished."""
    try:
        if not is_finished(member, plan):
            check_assignment(member, plan)
    except ShoalError as error:
        return str(error)
    return ""


def _figures(records: list[dict[str, Any]], plan: RunPlan) -> dict[str, Any]:

    last = records[-1] if records else None
    grouped: dict[str, int] = next((r["clusters"] for r in reversed(records) if r["clusters"]), {})
    sizes = cluster_sizes(grouped)
    return {
        "closed": last["round"] if last else 0,
        "finished": bool(last and last["final"]),
        "loss": last["loss"] if last else None,
        "accuracy": last["correct"] / last["tested"] if last and last["tested"] else None,
        "clusters": len(sizes) if last else None,
        "cluster_sizes": sizes,
        "groups": _groups(records),
        "split_refused": _split_refused(records),
        "too_small": len(too_small(grouped, plan.recipe.min_contributors)),
        "still": list(last.get("still", ())) if last else [],
        "missing": last["missing"] if last else [],
        "declined": last.get("declined", {}) if last else {},
        "capped": _rounds_of(records, "capped"),
        "refused_norm": _rounds_of(records, "refused_norm"),
        "out_of_step": _rounds_of(records, "out_of_step"),
        "stands_apart": _standing_apart(records),
    }


def _groups(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the number of groups that a strategy has found, and their silhouette; None if it has not looked for any.

    Groups that were refused are one group.
    """
    decided = {"groups-found": None, "groups-refused": 1, "one-group": 1}
    for record in reversed(records):
        for event in record["events"]:
            if event["kind"] in decided:
                return {"k": decided[event["kind"]] or event["k"], "silhouette": event["silhouette"]}
    return None


def _split_refused(records: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return round, cluster and reason of the last trial of a split, if it was refused."""
    tried = (e for r in reversed(records) for e in reversed(r["events"]) if e["kind"] in ("split", "split-refused"))
    last = next(tried, None)
    if last is None or last["kind"] == "split":
        return None
    return {name: last[name] for name in ("round", "cluster", "reason")}


def _standing_apart(records: list[dict[str, Any]]) -> dict[str, int]:
    """Return device -> number of rounds that named it since it stands apart."""
    named = ({e["device"] for e in r["events"] if e["kind"] == STANDS_APART} for r in records)
    return dict(sorted(Counter(device for devices in named for device in devices).items()))


def _rounds_of(records: list[dict[str, Any]], name: str) -> dict[str, int]:
    """Return device -> number of rounds whose record has the device under ``name``."""
    return dict(sorted(Counter(device for r in records for device in r.get(name, {})).items()))


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
        broker=in_words(member.broker),
        active=member.roster.active(),
        revoked=tuple(member.roster.revoked),
        labels=member.roster.labelled,
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


def _chosen(runs: Sequence[StoredRun], served: int | None) -> StoredRun | None:
    """Return the run that is served; without one the first unfinished run, or the last run."""
    ordered = [
        *(run for run in runs if run.run == served),
        *(run for run in runs if not run.finished),
        *reversed(runs),
    ]
    return ordered[0] if ordered else None
