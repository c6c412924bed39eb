"""The aggregator's answers as lines for people, and as the data of ``--json`` with times in ISO 8601."""

from __future__ import annotations

from typing import Any

from aggregator.rounds.state import RunPhase
from aggregator.status.answers import QUEUED, STOPPED_UNBEGUN, LogRecord, RunEntry, ScheduleEntry
from aggregator.status.record import NOT_SERVED, document_of
from shoal.util.console import second, span

PHASES = {
    QUEUED: "begins once no other run is under way",
    STOPPED_UNBEGUN: "over before its first round",
    NOT_SERVED: "not served now",
    RunPhase.GATHERING.value: "waits for devices",
    RunPhase.ROUND.value: "round open",
    RunPhase.FINAL.value: "final round open",
    RunPhase.FINISHED.value: "finished",
}


def run_line(entry: RunEntry) -> str:
    """Return a run as one line."""
    phase = PHASES.get(entry.phase, entry.phase)
    if entry.order and entry.phase == RunPhase.GATHERING.value:
        phase = entry.order
    elif entry.order:
        phase += f", {entry.order}"
    last = f", last round closed {second(entry.round_at_s)}" if entry.round_at_s is not None else ""
    obstacle = f"; {entry.obstacle}" if entry.obstacle else ""
    return f"run {entry.run}: {entry.algorithm}, {phase}, round {entry.round} of {entry.rounds}{last}{obstacle}"


def run_data(entry: RunEntry) -> dict[str, Any]:
    """Return a run as the data of ``--json``."""
    return {**document_of(entry), "run_id": entry.run_id.hex()}


def schedule_line(entry: ScheduleEntry) -> str:
    """Return a standing order as one line."""
    runs = f"runs {entry.first} to {entry.first + entry.count - 1}, {entry.begun} begun"
    grows = f", when data have grown by {entry.growth} %" if entry.growth else ""
    ends = f"one every {span(entry.interval_s)} until {second(entry.until_s)}{grows}"
    kept = f"; with an earlier model, which fits their data better: {', '.join(entry.kept)}" if entry.kept else ""
    return f"standing order: {entry.algorithm}, {runs}, {ends}; {entry.waits or 'the next run begins after any under way'}{kept}"


def schedule_data(entry: ScheduleEntry) -> dict[str, Any]:
    """Return a standing order as the data of ``--json``."""
    document = document_of(entry)
    del document["interval"]  # a time span, and no time
    return {**document, "interval_s": entry.interval_s}


def record_line(record: LogRecord) -> str:
    """Return a record of a run's log as one line."""
    at = "-" if record.closed_at_s is None else second(record.closed_at_s)
    accuracy = f", accuracy {100 * record.correct / record.tested:.1f}%" if record.tested else ""
    sizes = f", clusters {'+'.join(map(str, record.cluster_sizes))}" if record.cluster_sizes else ""
    events = f", {', '.join(record.events)}" if record.events else ""
    name = "final round" if record.final else "round"
    took = f"{record.contributed} of {record.ordered} devices in {record.seconds:.1f} s"
    loss = (
        f", loss {record.loss:.4g}" if record.loss else ""
    )  # without one if no device has trained, or no sum was opened
    return f"{at} {name} {record.round}: {took}{loss}{accuracy}{sizes}{_missing(record)}{events}"


def _missing(record: LogRecord) -> str:
    if not record.absent:
        return ""
    named = ", ".join(
        f"{name} ({record.declined[name]})" if name in record.declined else name for name in record.missing[:5]
    )
    return f", missing {named}{f' and {record.absent - 5} more' if record.absent > 5 else ''}"


def record_data(record: LogRecord) -> dict[str, Any]:
    """Return a record of a run's log as the data of ``--json``."""
    return {**document_of(record), "declined": dict(record.declined)}
