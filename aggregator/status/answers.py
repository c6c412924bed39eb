"""The documents in the aggregator's answers to the owner: runs, records of a run's log, and the state of the fleet.

Each is a frozen dataclass that `shoal.util.state_codec` encodes. The owner's program takes nothing but these fields, and skips
those that a later aggregator adds; `printable` replaces control characters in their texts. A field is never removed, and a new
one has a default, which stands where an earlier aggregator lacks the field.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from aggregator.status.record import FleetStatus, Problem
from shoal import limits
from shoal.errors import DocumentError, WireError, printable
from shoal.util.state_codec import decode_state, encode_state

QUEUED: Final = "queued"
"""Phase of a run that has not begun: an earlier one is served, or it waits for a roster or keys."""
STOPPED_UNBEGUN: Final = "stopped_before_first_round"
"""Phase of a run that the owner stopped before its first round."""
MOST_DEVICES: Final = 20_000
"""Most devices in an answer: the status of as many takes some 8 MB."""
MOST_NAMES: Final = 100
"""Most names of devices in one record of an answer."""
DOCUMENT_BYTES: Final = limits.MAX_ANSWER_BYTES - 16 * 1024
"""Largest document: reason, hint and envelope take the rest of an answer."""

D = TypeVar("D")


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEntry:
    """A run at the aggregator. Times are unix seconds, None where unknown.

    Attributes:
        phase: QUEUED, STOPPED_UNBEGUN, or a phase of `aggregator.status.record.RunStatus`.
        round: the open round; without one, the last closed round of training.
        order: the owner's order in words; empty for a run that goes on.
        obstacle: why the run can't be served; empty if it can.
        stored_at_s: time at which the run package came to the aggregator.
        round_at_s: close of the last round.
        wire: wire version of its messages.
        left_out: in the answer to START, the first MOST_NAMES devices of the roster that do not speak it, with their software.
        short: in the answer to START, the first MOST_NAMES devices that report too little free memory for its model.
    """

    run: int
    run_id: bytes
    algorithm: str
    phase: str
    round: int
    rounds: int
    order: str = ""
    obstacle: str = ""
    stored_at_s: int | None = None
    round_at_s: int | None = None
    wire: int = 0
    left_out: tuple[str, ...] = ()
    short: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRecord:
    """A closed round in a run's log.

    Attributes:
        closed_at_s: unix seconds; None if unknown.
        missing: the first MOST_NAMES devices that did not upload; absent: the number of all of them.
        declined: device -> reason, of the first MOST_NAMES that gave one.
        cluster_sizes: devices in each cluster, the largest first.
        events: kinds of the round's events, such as "split" or "stopped".
    """

    round: int
    final: bool
    closed_at_s: int | None
    seconds: float
    ordered: int
    contributed: int
    absent: int
    missing: tuple[str, ...]
    declined: Mapping[str, str]
    loss: float
    correct: int
    tested: int
    cluster_sizes: tuple[int, ...]
    events: tuple[str, ...]
    bytes_up: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleEntry:
    """The owner's standing order.

    Attributes:
        first, count: number of its first run, and of its runs at most.
        begun: number of its runs that have begun.
        interval_s, until_s, growth: see `shoal.protocol.documents.Schedule`.
        waits: why the next run has not begun; empty if it is about to.
        kept: the first MOST_NAMES devices for which the newest run's model is worse, on their validation share, than that in use.
    """

    first: int
    count: int
    begun: int
    algorithm: str
    interval_s: int
    until_s: int
    growth: int
    waits: str
    kept: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RunPage:
    """Answer about runs by number: all of them to LIST, else the one in question; LOGS adds its last records, oldest first.

    A question about the standing order has that alone.
    """

    runs: tuple[RunEntry, ...]
    records: tuple[LogRecord, ...] = ()
    schedule: ScheduleEntry | None = None


def encoded(page: RunPage | FleetStatus) -> bytes:
    """Return an answer's document, cut to DOCUMENT_BYTES: the oldest records and runs and the last devices are left out first.

    The answer to STATUS is the fleet's record itself.
    """
    halvings = 0
    while True:
        data = json.dumps(encode_state(_shortened(page, halvings)).document).encode()
        if len(data) <= DOCUMENT_BYTES:
            return data
        halvings += 1


def _shortened(page: RunPage | FleetStatus, halvings: int) -> RunPage | FleetStatus:
    """Return the page with its longest part halved so many times."""
    if isinstance(page, FleetStatus):
        return cut(page, len(page.devices) >> halvings)
    part = "records" if page.records else "runs"
    items = getattr(page, part)
    return dataclasses.replace(page, **{part: items[len(items) - (len(items) >> halvings) :]})


def cut(status: FleetStatus, most: int = MOST_DEVICES) -> FleetStatus:
    """Return the record with at most ``most`` devices, and a problem that says so if there are more."""
    if len(status.devices) <= most:
        return status
    left_out = Problem(
        f"{len(status.devices) - most} devices are left out of this answer",
        "shoal-aggregator status DIR has all of them",
    )
    run = status.run
    if run is not None:
        run = dataclasses.replace(run, missing=run.missing[:most], clusters=())
    return dataclasses.replace(status, problems=(*status.problems, left_out), run=run, devices=status.devices[:most])


def decoded(kind: type[D], data: bytes | memoryview) -> D:
    """Return the document of an answer.

    Raises:
        WireError: the document is not a ``kind``.
    """
    try:
        cleaned: D = _clean(decode_state(kind, json.loads(bytes(data)), mixed=True))
    except (ValueError, RecursionError, DocumentError) as error:
        raise WireError(f"the aggregator's answer is malformed: {error}") from error
    return cleaned


def _clean(value: Any) -> Any:
    if isinstance(value, str):
        return printable(value)
    if isinstance(value, Mapping):
        return {_clean(key): _clean(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(map(_clean, value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _clean(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return dataclasses.replace(value, **fields)
    return value
