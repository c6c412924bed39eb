"""Facts known to the running daemon alone: its connection to the broker, the devices' presences, and the open round.

The records of devices, workers and the run are also those of `FleetStatus`: `aggregator.status.record.build` completes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from shoal.limits import CHUNK_BYTES
from shoal.membership.grants import WORKER_ROLE
from shoal.protocol.messages import Vitals

INTERNAL: Final = "internal"
"""Mark of fields that are no part of the document that people and programs read."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectionFacts:
    """The daemon's connection to the broker. Times are unix seconds.

    Attributes:
        broker: its address, without user and password.
        connected: whether the broker has accepted the connection and it has not ended.
        since_s: since when; before the first connection, since the start of the daemon.
        reason: why the connection ended; empty while it stands.
        lost_s: time at which the connection was lost last; None if it never was.
        expires: certificate (``broker``, ``ca``, ``client``) -> time at which it expires.
        chunk_bytes: largest chunk that it sends now, by the setting, the broker's limit and the link's pace.
    """

    broker: str
    connected: bool
    since_s: int
    reason: str = ""
    lost_s: int | None = None
    expires: Mapping[str, int] = field(default_factory=dict)
    chunk_bytes: int = CHUNK_BYTES


def _internal(default: Any) -> Any:
    """Return a field by which `aggregator.status.record.build` decides, and which `FleetStatus.document` leaves out."""
    return field(default=default, metadata={INTERNAL: True})


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceStatus:
    """One device: the daemon records facts from the device's messages, and `build` adds its conclusions.

    Times are unix seconds; None if the daemon has not heard of it.

    Attributes:
        online: by its newest presence, None before the first; in a built record None while the aggregator can't know.
        since_s: since when it is online or offline, as far as this is known.
        last_seen_s: time of its last signed message that was not retained at the broker; it is silent between rounds.
        last_upload_s: time at which its last upload was durable.
        version: of its software, by its presence.
        clock_ahead_s: its clock less the aggregator's, in seconds, when it last connected.
        model_run: number of the run whose finished model it answers with, by its presence; 0 without one, None if unknown.
        vitals: its condition, if it reports that; vitals_at_s: time of the report by the device's clock.
        wire: the wire version that it speaks, by its presence.
        left_out: number of damaged samples that it leaves out, by its presence.
        declined: lower-case name of the `DeclineReason` of the last round that it declined, unless it has uploaded or come
            online since.
        doubted: whether its model is right no more often than its most common label, by its presence.
        refused: why its last message was refused that it had signed and that was false, unless it has come online since.
        cluster: built: in the run; None before it has one.
        reason, advice: built: why it can't take part, and advice; empty if it can, or if that is unknown.
        version_state: built: OLDER, NEWER, SAME or OTHER of `aggregator.status.versions`, beside the aggregator's.
        version_advice: built: advice about another version; empty if it is the same or unknown.
        accuracy: built: on its own test share, 0 to 1, in the newest round that tested; None if it was not asked or has none.
        labels: built: by key, as the owner signed them; `name` is the name that people see.
    """

    name: str
    online: bool | None = None
    since_s: int | None = None
    last_seen_s: int | None = None
    last_upload_s: int | None = None
    cluster: int | None = None
    version: str = ""
    clock_ahead_s: int | None = None
    model_run: int | None = None
    vitals: Vitals | None = None
    vitals_at_s: int | None = _internal(None)
    reason: str = ""
    advice: str = ""
    wire: int | None = None
    version_state: str = ""
    version_advice: str = ""
    left_out: int = 0
    accuracy: float | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    declined: str = _internal("")
    doubted: bool = _internal(False)
    refused: str = _internal("")


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """One of the workers of a sharded aggregator, or the keeper of a run.

    Attributes:
        role: `WORKER_ROLE` or `KEEPER_ROLE`.
        online: by its newest presence since the coordinator began to serve the run; in a built record None while the
            coordinator can't know.
        last_report_s: unix seconds of its last report or answer to a job since then; None before the first.
        lacking: uploads of the open round whose parts it has not reported.
        waits_for: built: reason for which the open round waits for this worker; empty if it does not.
        reason, advice: built: why it can't work, and advice; empty if it can, or if that is unknown.
    """

    name: str
    online: bool | None = None
    last_report_s: int | None = None
    lacking: int = _internal(0)
    role: str = _internal(WORKER_ROLE)
    waits_for: str = ""
    reason: str = ""
    advice: str = ""


@dataclass(frozen=True, slots=True)
class MissingDevice:
    """A device that the open round, or the gathering before it, still waits for."""

    device: str
    since_s: int | None
    reason: str
    advice: str


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    """A cluster: accuracy on its devices' test shares and mean loss, None where no device has reported one."""

    id: int
    members: tuple[str, ...]
    accuracy: float | None
    loss: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RunStatus:
    """A run: the one that is served, as the daemon knows it, or the next, or the last. Times are unix seconds.

    Attributes:
        run, algorithm, rounds: of the plan.
        round: number of the open round; without one, of the last.
        phase: value of a `RunPhase`, or NOT_SERVED of `aggregator.status.record`.
        since_s: since when the phase or the round lasts; None for a run that is not served.
        deadline_at_s: end of the time for the open round, or for gathering devices; None in other phases.
        deadline_passed: whether that is over.
        quorum: uploads with which the open round closes; while gathering, devices that must be online.
        received: durable uploads to the open round; while gathering, devices that are online.
        order: the owner's order in words, such as "paused by the owner"; empty for a run that goes on.
        computing: whether the open round is being closed: its updates are there, and the computation takes long.
        waiting: devices that the round, or the gathering, still waits for, in name order.
        not_waited_for: devices that rounds wait for no longer, since they left as many unanswered, in name order.
        obstacle: why no device can help the run to go on; empty if one can.
        shortage, advice: why the run can't go on after its deadline, or at once if the fleet is too small, and advice to
            the operator; empty if it can.
        workers: the aggregator's workers, in the order of the plan; none without workers, and once the run is finished.
        line: the last waiting line of the log; empty if the run goes on.
        lacks: the shortage that it names, as JSON has it (`aggregator.run_log`); None without one.
        missing: built: the devices that it waits for; empty while the aggregator can't know.
        clusters: built: by id.
    """

    run: int
    algorithm: str
    round: int
    rounds: int
    phase: str
    since_s: int | None = None
    deadline_at_s: int | None = None
    deadline_passed: bool = False
    quorum: int = 0
    received: int = 0
    missing: tuple[MissingDevice, ...] = ()
    clusters: tuple[ClusterStatus, ...] = ()
    order: str = ""
    computing: bool = False
    waiting: tuple[str, ...] = _internal(())
    not_waited_for: tuple[str, ...] = _internal(())
    obstacle: str = _internal("")
    shortage: str = _internal("")
    advice: str = _internal("")
    workers: tuple[WorkerStatus, ...] = _internal(())
    line: str = _internal("")
    lacks: Mapping[str, Any] | None = _internal(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveFacts:
    """All facts of the daemon at one time. Times are unix seconds.

    Attributes:
        version: of the daemon's software.
        wire: the wire version that it speaks.
        ended_at_s: end of the daemon; None while it runs, and if it was killed.
        error, hint: the error that ended it, and its hint; empty if it was asked to end.
        alive_at_s: time at which it last showed that it is alive; the file's own time says so, not the text in it.
        connection: to the broker.
        devices: by name.
        run: the run that is served; None if none is.
    """

    version: str
    wire: int | None = None
    connection: ConnectionFacts
    devices: Mapping[str, DeviceStatus] = field(default_factory=dict)
    run: RunStatus | None = None
    ended_at_s: int | None = None
    error: str = ""
    hint: str = ""
    alive_at_s: int = 0
