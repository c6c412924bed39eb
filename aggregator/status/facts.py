"""Facts known only to the running daemon: its connection to the broker, the devices' presences, and the open round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from shoal.limits import CHUNK_BYTES
from shoal.protocol.messages import Vitals


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFacts:
    """The daemon's connection to the broker. Times are unix seconds.

    Attributes:
        broker: its address, without user and password.
        connected: whether the broker has accepted the connection and it has not ended.
        since_s: since when; before the first connection, since the start of the daemon.
        reason: why the connection ended; empty while it stands.
        lost_s: time at which the connection was lost last; None if it never was.
        chunk_bytes: largest chunk that it sends now, by the setting, the broker's limit and the link's pace.
    """

    broker: str
    connected: bool
    since_s: int
    reason: str = ""
    lost_s: int | None = None
    chunk_bytes: int = CHUNK_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceFacts:
    """Facts from the messages of one device. Times are unix seconds; None if it has not heard of it.

    Attributes:
        online: by its newest presence; None before the first.
        since_s: since when it is online or offline, as far as this is known.
        last_seen_s: time of its last signed message that was not retained at the broker.
        last_upload_s: time at which its last upload was durable.
        version: of its software, by its presence.
        clock_ahead_s: its clock less the aggregator's, in seconds, when it last connected.
        answers: number of the run whose finished model it answers with, by its presence; 0 without one, None if unknown.
        vitals: its condition, if it reports that; vitals_at_s: time of the report by the device's clock.
        declined: lower-case name of the `DeclineReason` of the last round that it declined, unless it has uploaded or come
            online since.
        wire: the wire version that it speaks, by its presence.
        left_out: number of damaged samples that it leaves out, by its presence.
        doubted: whether its model is right no more often than its most common label, by its presence.
        refused: why its last message was refused that it had signed and that was false, unless it has come online since.
    """

    online: bool | None = None
    since_s: int | None = None
    last_seen_s: int | None = None
    last_upload_s: int | None = None
    version: str = ""
    clock_ahead_s: int | None = None
    answers: int | None = None
    vitals: Vitals | None = None
    vitals_at_s: int | None = None
    declined: str = ""
    wire: int | None = None
    left_out: int = 0
    doubted: bool = False
    refused: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerFacts:
    """One of the aggregator's workers.

    Attributes:
        online: by its newest presence since the coordinator began to serve the run.
        last_report_s: unix seconds of its last report or answer to a job since then; None before the first.
        lacking: uploads of the open round whose parts it has not reported.
    """

    name: str
    online: bool = False
    last_report_s: int | None = None
    lacking: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """The run that is served. Times are unix seconds.

    Attributes:
        run: its number.
        phase: value of its `RunPhase`.
        round: number of the open round, or of the last one.
        since_s: since when the phase or the round lasts.
        deadline_at_s: end of the time for the open round, or for gathering devices; None if the run is finished.
        deadline_passed: whether that is over.
        needed: uploads with which the open round closes; while gathering, devices that must be online.
        received: durable uploads to the open round; while gathering, devices that are online.
        waiting: devices that the round, or the gathering, still waits for, in name order.
        not_waited_for: devices that rounds wait for no longer, since they left as many unanswered, in name order.
        obstacle: why no device can help the run to go on; empty if one can.
        shortage, advice: why the run can't go on after its deadline, or at once if the fleet is too small, and advice to
            the operator; empty if it can.
        order: the owner's order in words, such as "paused by the owner"; empty for a run that goes on.
        computing: whether the open round is being closed: its updates are there, and the computation takes long.
        workers: the aggregator's workers, in the order of the plan; none without workers, and once the run is finished.
    """

    run: int
    phase: str
    round: int
    since_s: int
    deadline_at_s: int | None
    deadline_passed: bool = False
    needed: int
    received: int
    waiting: tuple[str, ...]
    not_waited_for: tuple[str, ...] = ()
    obstacle: str = ""
    shortage: str = ""
    advice: str = ""
    order: str = ""
    computing: bool = False
    workers: tuple[WorkerFacts, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFacts:
    """All facts of the daemon at one time. Times are unix seconds.

    Attributes:
        version: of the daemon's software.
        wire: the wire version that it speaks.
        started_at_s: start of the daemon.
        ended_at_s: end of the daemon; None while it runs, and if it was killed.
        error, hint: the error that ended it, and its hint; empty if it was asked to end.
        connection: to the broker.
        devices: by name.
        run: the run that is served; None if none is.
    """

    version: str
    wire: int | None = None
    started_at_s: int
    connection: ConnectionFacts
    devices: Mapping[str, DeviceFacts] = field(default_factory=dict)
    run: RunFacts | None = None
    ended_at_s: int | None = None
    error: str = ""
    hint: str = ""


class Live(NamedTuple):
    """The facts of the last daemon, and the time in unix seconds at which it last showed that it is alive."""

    facts: LiveFacts
    alive_at_s: int
