"""The record of a fleet's state, and the pure function that builds it.

`build` decides by these rules, in this order:

    the daemon does not run           which devices are online is unknown; the reason is how the daemon ended
    it is not connected               which devices are online is unknown; the reason is the broker, and no device is missing
    its loop shows no sign of life    which devices are online is unknown; the reason is the daemon
    the connection has just come back devices that were online before are given RETURN_S seconds
    otherwise                         each device by its presence, its last decline, its clock and the open round

Example: a device that was killed.

    >>> from aggregator.status.facts import ConnectionFacts, DeviceStatus, LiveFacts
    >>> from aggregator.status.record import Facts, build
    >>> up = ConnectionFacts(broker="mqtt://reef:1883", connected=True, since_s=1000)
    >>> gone = {"dev-1": DeviceStatus(name="dev-1", online=False, since_s=5000, last_seen_s=4990)}
    >>> live = LiveFacts(version="0.1.0", connection=up, devices=gone, alive_at_s=5060)
    >>> facts = Facts(fleet="reef", running=True, live=live, broker="", active=("dev-1",), now_s=5061)
    >>> build(facts).devices[0].reason, build(facts).devices[0].online
    ('offline', False)
"""

from __future__ import annotations

import dataclasses
import itertools
import operator
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aggregator.rounds.standstill import named
from aggregator.rounds.state import SILENT_ROUNDS, RunPhase
from aggregator.run_log import DECLINE_REASONS
from aggregator.status import versions
from aggregator.status.facts import (
    INTERNAL,
    ClusterStatus,
    DeviceStatus,
    LiveFacts,
    MissingDevice,
    RunStatus,
    WorkerStatus,
)
from shoal import limits
from shoal.limits import CLOCK_OFF_S
from shoal.membership.grants import KEEPER_ROLE, WORKER_ROLE
from shoal.protocol.documents import SHOWN, read_labels
from shoal.protocol.messages import DeclineReason
from shoal.util.console import counted, second, span

RETURN_S: Final = limits.RECONNECT_MAX_S + 10
"""Time that devices may take to connect again after the broker was away: their longest pause, and a handshake."""
LOST_WITH_S: Final = 10
"""A device whose presence ended this long before the aggregator's connection did was lost together with it."""
ALIVE_EVERY_S: Final = 5
"""Interval at which the daemon shows that its loop is alive."""
SILENT_S: Final = 6 * ALIVE_EVERY_S
"""Time without a sign of life after which the daemon's loop counts as stuck."""
FIRST_PRESENCES_S: Final = 5
"""Time after a connection within which the broker sends the presences that it retains."""
REVOKED: Final = "revoked by the owner"
"""Reason of a device that the owner has revoked."""
NOT_SERVED: Final = "not_served"
"""Phase of a run that is neither finished nor served now; the other phases are those of `RunPhase`."""

START_HINT: Final = "start it: shoal-aggregator serve DIR; it continues where it was"
BROKER_HINT: Final = "start the broker, or mend the network between; aggregator and devices connect again by themselves"
OFFLINE_HINT: Final = (
    "start it again; if it runs, `shoal-edge status` on it says why (a wrong clock, for instance); if it is gone for good: "
    "shoal-fleet revoke FLEET_DIR NAME"
)
WORKER_HINT: Final = (
    "start it again: shoal-aggregator shard serve DIR --interface NAME; it has its files. If its disk is lost, "
    "take the run's file out of the aggregator's runs directory, and have the owner add the new worker and sign another run"
)
KEEPER_HINT: Final = (
    "start it again: shoal-keeper serve DIR. If its disk or its keys are lost: shoal-fleet run stop --now, and name a keeper "
    "with new keys in another run"
)
DOUBTED_HINT: Final = (
    "`shoal-edge status` there has the figures: check labels and scales; then more rounds, another --local lr=, or "
    "--algorithm cfl if only some devices are concerned"
)
SILENT_HINT: Final = "read its log, and `shoal-edge status` on it; starting it again is safe"
CLOCK_HINT: Final = (
    "set its clock (timedatectl set-ntp true): a device whose clock is wrong takes the roster for expired"
)
DECLINE_HINTS: Final = {
    DeclineReason.DATA: "its log, `shoal-edge status DIR` and `shoal-edge doctor DIR --data FILE` there have the reason; start "
    "it with data that fit",
    DeclineReason.TASK: "the device's log and `shoal-edge status DIR` there have the reason",
    DeclineReason.REFUSED: "the device's log says which rule of its own was broken",
    DeclineReason.OTHER: "the device's log has the reason",
    DeclineReason.UPLOAD: "its log and the aggregator's say why; a norm above the limit: training diverges, take a smaller lr",
    DeclineReason.DISK: "free some space on the device, and start it again: `shoal-edge status` there shows the error",
    DeclineReason.STATE: "wait: it takes a checkpoint by itself in one of the next rounds",
    DeclineReason.SUM: "wait: the step is undone, and who spoils sums is searched for; if it goes on, look at the aggregator",
    DeclineReason.KEYS: "wait: it takes part again in the first round under the newer keys",
    DeclineReason.TRAINER: "the device's log and `shoal-edge status DIR` there have the reason: the task needs the trainer that "
    "its `--trainer` names, in the same version and with the same layout",
    DeclineReason.METERED: "wait: it takes part again after the hours that `--metered` names on the device",
}
FALSE_HINT: Final = (
    "no device does that by itself: check its software, and who has its keys; "
    "shoal-fleet revoke FLEET_DIR NAME excludes it"
)
_BY_NAME: Final = {reason.name.lower(): reason for reason in DeclineReason}


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredRun:
    """A run as the store and the owner's plan have it.

    Attributes:
        run, algorithm, rounds: of the plan.
        closed: number of the last closed round of training; 0 before the first.
        finished: whether the final round is closed, or the run was stopped before its first round.
        clusters: device -> cluster.
        tests: device -> (correct, tested) of the last round in which devices reported them.
        losses: cluster -> mean loss of its devices in the last closed round.
        order: the owner's order in words; empty for a run that goes on.
        wire: wire version of its messages; 0 if unknown.
    """

    run: int
    algorithm: str
    rounds: int
    closed: int = 0
    finished: bool = False
    clusters: Mapping[str, int] = field(default_factory=dict)
    tests: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    order: str = ""
    wire: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """All that `build` decides by. Times are unix seconds.

    Attributes:
        fleet: its name.
        running: whether a daemon holds the lock of the directory.
        live: the facts that the last daemon wrote; None without any.
        broker: the address in the grant, in case that no daemon has written another.
        active: the devices of the roster.
        revoked: the devices that the owner has revoked.
        labels: device -> the text of its labels.
        run: the run to report; None if absent.
        disk_free_bytes: of the aggregator's directory; None if it can't be read.
        expires: certificate, or ``roster`` -> time at which it expires.
        now_s: the time.
    """

    fleet: str
    running: bool
    live: LiveFacts | None
    broker: str
    active: tuple[str, ...]
    revoked: tuple[str, ...] = ()
    labels: Mapping[str, str] = field(default_factory=dict)
    run: StoredRun | None = None
    disk_free_bytes: int | None = None
    expires: Mapping[str, int] = field(default_factory=dict)
    now_s: int


@dataclass(frozen=True, slots=True)
class Problem:
    """An obstacle to the fleet's work, and advice to the operator."""

    reason: str
    advice: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetStatus:
    """The state of a fleet, as its aggregator knows it.

    Attributes:
        running: whether the daemon runs.
        connected: whether it is connected to the broker.
        broker: the broker's address, without user and password.
        since_s: unix seconds since when it is connected, or not connected, or not running; None if it never ran.
        problems: those of the aggregator, the broker and the run. A device's own are in `DeviceStatus.reason`.
        version: of the aggregator's software; empty if it never ran.
        wire: the wire version that it speaks.
        workers: of the run that is served; none without workers.
        chunk_bytes: largest chunk that it sends; less than CHUNK_BYTES for a broker or a link that takes small ones only.
    """

    fleet: str
    running: bool
    connected: bool
    broker: str
    since_s: int | None
    problems: tuple[Problem, ...]
    run: RunStatus | None
    devices: tuple[DeviceStatus, ...]
    version: str = ""
    wire: int | None = None
    workers: tuple[WorkerStatus, ...] = ()
    chunk_bytes: int = limits.CHUNK_BYTES

    def document(self) -> dict[str, Any]:
        """Return the record as JSON has it, see `document_of`."""
        return dict(document_of(self))


def document_of(value: Any) -> Any:
    """Return a record as JSON has it: times in ISO 8601, under their names without ``_s``."""
    if isinstance(value, DeviceStatus) and value.vitals is not None:
        vitals = dataclasses.asdict(value.vitals)
        vitals = {"at": _time(value.vitals_at_s), "uptime_seconds": vitals.pop("uptime_s"), **vitals}
        return {**document_of(dataclasses.replace(value, vitals=None)), "vitals": vitals}
    if dataclasses.is_dataclass(value):
        named = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value) if INTERNAL not in f.metadata]
        return {
            k.removesuffix("_s") if _is_time(k) else k: _time(v) if _is_time(k) else document_of(v) for k, v in named
        }
    return [document_of(item) for item in value] if isinstance(value, tuple | list) else value


def _is_time(name: str) -> bool:
    return name.endswith("_s") and name != "clock_ahead_s"


def _time(at_s: int | None) -> str | None:
    return None if at_s is None else second(at_s)


def build(facts: Facts) -> FleetStatus:
    """Return the state of a fleet."""
    return _Builder(facts).status()


def by_label(devices: Iterable[DeviceStatus]) -> dict[str, list[DeviceStatus]]:
    """Return the devices that have each label, KEY=VALUE in alphabetical order; shown names are left out."""
    found = sorted((f"{k}={v}", d.name, d) for d in devices for k, v in d.labels.items() if k != SHOWN)
    return {label: [d for _, _, d in same] for label, same in itertools.groupby(found, key=operator.itemgetter(0))}


class _Builder:
    """The facts, and the conclusions from them for the whole fleet."""

    def __init__(self, facts: Facts) -> None:
        self.facts = facts
        live = facts.live
        # A daemon that has just started has not replaced its predecessor's file yet.
        self.live = None if live is None or (facts.running and live.ended_at_s is not None) else live
        self.connection = None if self.live is None else self.live.connection
        self.connected = facts.running and self.connection is not None and self.connection.connected
        self.silent = facts.running and live is not None and facts.now_s - live.alive_at_s > SILENT_S
        self.watched = self.connected and not self.silent
        self.version = "" if live is None else live.version
        self.heard = {} if live is None else live.devices
        self.served = self.live.run if self.live is not None and facts.running else None
        self.lost_s, self.back_s = None, facts.now_s
        if self.watched and self.connection is not None and facts.now_s - self.connection.since_s < RETURN_S:
            self.lost_s, self.back_s = self.connection.lost_s, self.connection.since_s
        self.skew_s = self._skew()

    def status(self) -> FleetStatus:
        facts = self.facts
        devices = {name: self.device(name) for name in facts.active}
        revoked = [self.device(name) for name in facts.revoked if name not in devices]
        return FleetStatus(
            fleet=facts.fleet,
            running=facts.running,
            connected=self.connected,
            broker=facts.broker if self.connection is None else self.connection.broker,
            since_s=self.since_s(),
            problems=tuple(self.problems()),
            run=None if facts.run is None else self.run(facts.run, devices),
            devices=(*devices.values(), *revoked),
            version=self.version,
            wire=None if facts.live is None else facts.live.wire,
            workers=self.workers(),
            chunk_bytes=limits.CHUNK_BYTES if self.connection is None else self.connection.chunk_bytes,
        )

    def since_s(self) -> int | None:
        live = self.facts.live
        if self.facts.running:
            return None if self.connection is None else self.connection.since_s
        return None if live is None else live.ended_at_s or live.alive_at_s

    def problems(self) -> list[Problem]:
        facts, found = self.facts, []
        if not facts.running and facts.live is not None:
            idle = facts.run is None or facts.run.finished
            if not (
                idle and facts.live.ended_at_s is not None and not facts.live.error
            ):  # it may end once its work is done
                found.append(_ended(facts.live))
        elif facts.running and not self.connected:
            broker = facts.broker if self.connection is None else self.connection.broker
            if self.connection is not None and self.connection.reason:
                found.append(Problem(f"no connection to the broker at {broker}: {self.connection.reason}", BROKER_HINT))
            else:
                found.append(
                    Problem(f"not connected to the broker at {broker} yet", "wait a moment; then read the log")
                )
        if self.silent and facts.live is not None:
            since = f"no sign of life from the aggregator's loop since {second(facts.live.alive_at_s)}"
            found.append(Problem(since, "a long computation, a stopped process or a full disk: read its log"))
        if facts.disk_free_bytes is not None and facts.disk_free_bytes < limits.LOW_DISK_BYTES:
            free = f"the aggregator's disk is full: {facts.disk_free_bytes} bytes are free"
            found.append(Problem(free, "free some space, then start the aggregator again"))
        if self.skew_s:
            skew = f"most devices' clocks are {_ahead(self.skew_s)} the aggregator's"
            found.append(Problem(skew, "set the clock of this machine (timedatectl set-ntp true)"))
        doubted = [name for name in facts.active if name in self.heard and self.heard[name].doubted]
        if doubted:
            few = f"{len(doubted)} of {counted(len(facts.active), 'device')}"
            found.append(Problem(f"{few} do no better than their most common label: {named(doubted)}", DOUBTED_HINT))
        if self.served is not None and self.watched and self.lost_s is None:
            found += self._run_problems(self.served)
        return found

    def _run_problems(self, served: RunStatus) -> list[Problem]:
        found = []
        if served.obstacle:
            found.append(Problem(served.obstacle, "the owner runs shoal-fleet publish FLEET_DIR"))
        if served.shortage:
            passed = "its deadline has passed, " if served.deadline_passed else ""
            found.append(Problem(f"run {served.run} can't go on: {passed}{served.shortage}", served.advice))
        waited_for = [worker for worker in self.workers() if worker.reason]
        return found + [
            Problem(f"{w.role} {w.name} is not connected: the round waits for it", w.advice) for w in waited_for
        ]

    def workers(self) -> tuple[WorkerStatus, ...]:
        return () if self.served is None else tuple(map(self._worker, self.served.workers))

    def _worker(self, heard: WorkerStatus) -> WorkerStatus:
        online = heard.online if self.watched and (heard.online or self._presences_are_here()) else None
        lacking = f"the parts of {counted(heard.lacking, 'upload')}" if heard.lacking and online else ""
        gone = online is False
        return dataclasses.replace(
            heard,
            online=online,
            waits_for="its connection" if gone else lacking,
            reason="is not connected" if gone else "",
            advice={WORKER_ROLE: WORKER_HINT, KEEPER_ROLE: KEEPER_HINT}[heard.role] if gone else "",
        )

    def _presences_are_here(self) -> bool:
        """Whether the connection stands for so long that the broker has sent all presences that it retains."""
        return self.connection is not None and self.facts.now_s - self.connection.since_s >= FIRST_PRESENCES_S

    def device(self, name: str) -> DeviceStatus:
        heard = self.heard.get(name) or DeviceStatus(name=name)
        online = self.online(heard)
        reason, advice = self.reason(name, heard, online)
        run = self.facts.run
        correct, tested = (0, 0) if run is None else run.tests.get(name, (0, 0))
        state = versions.compared(heard.version, self.version)
        return dataclasses.replace(
            heard,
            online=online,
            since_s=heard.since_s if online is not None else None,
            cluster=None if run is None else run.clusters.get(name),
            reason=reason,
            advice=advice,
            version_state=state,
            version_advice=versions.advice(state, self.version),
            accuracy=correct / tested if tested else None,
            labels=read_labels(self.facts.labels.get(name, "")),
        )

    def online(self, heard: DeviceStatus) -> bool | None:
        if not self.watched or heard.online is not None:
            return heard.online if self.watched else None
        # The broker retains each device's presence: without one, the device has never connected.
        return False if self._presences_are_here() else None

    def reason(self, name: str, heard: DeviceStatus, online: bool | None) -> tuple[str, str]:
        """Return why a device can't take part, and advice; empty if it can, or if that is unknown."""
        if name in self.facts.revoked:
            return REVOKED, "switch it off; it learns so when it connects, and ends with status 6"
        if online is None:
            return "", ""
        if heard.refused:
            return f"has signed a false message: {heard.refused}", FALSE_HINT
        if not online:
            return self._absence(heard)
        run = self.facts.run
        if run is not None and not run.finished and run.wire and heard.wire not in (None, run.wire):
            return versions.left_out(heard.version, heard.wire, run.wire)
        ahead_s = heard.clock_ahead_s
        if ahead_s is not None and not self.skew_s and abs(ahead_s) > CLOCK_OFF_S:
            return f"its clock is {_ahead(ahead_s)} the aggregator's", CLOCK_HINT
        declined = _BY_NAME.get(heard.declined)
        if declined is not None:
            return DECLINE_REASONS[declined], DECLINE_HINTS[declined]
        if self.served is not None and name in self.served.not_waited_for:
            return f"online, but has left {SILENT_ROUNDS} rounds or deadlines unanswered: not waited for", SILENT_HINT
        if self.served is not None and self.served.deadline_passed and name in self.served.waiting:
            late = f"online, but has not answered round {self.served.round} within its deadline"
            return late, SILENT_HINT
        free = None if heard.vitals is None else heard.vitals.disk_free_bytes
        if free is not None and free < limits.LOW_DISK_BYTES:
            return f"its disk is almost full: {free} bytes were free", DECLINE_HINTS[DeclineReason.DISK]
        return "", ""

    def _absence(self, heard: DeviceStatus) -> tuple[str, str]:
        if heard.declined == DeclineReason.DISK.name.lower():
            return f"offline: its {DECLINE_REASONS[DeclineReason.DISK]}", DECLINE_HINTS[DeclineReason.DISK]
        if heard.last_seen_s is None and heard.online is None:
            return "has not connected yet", "start it: shoal-edge run DIR --data FILE"
        # A device that was heard since the connection came back has left by itself.
        lost = self.lost_s is not None and (heard.since_s is None or heard.since_s >= self.lost_s - LOST_WITH_S)
        if lost and (heard.last_seen_s or 0) < self.back_s:
            return "not back yet since the broker was away", f"wait: devices connect again within {RETURN_S} s"
        return "offline", OFFLINE_HINT

    def run(self, stored: StoredRun, devices: Mapping[str, DeviceStatus]) -> RunStatus:
        served, clusters = self.served, tuple(_clusters(stored, devices))
        if served is None or served.run != stored.run:
            return RunStatus(
                run=stored.run,
                algorithm=stored.algorithm,
                round=min(stored.closed, stored.rounds),
                rounds=stored.rounds,
                phase=RunPhase.FINISHED.value if stored.finished else NOT_SERVED,
                clusters=clusters,
                order=stored.order,
            )
        # A stopped run's final round follows the last one planned, not the last one done.
        last = stored.closed if served.phase == RunPhase.FINISHED.value else served.round
        missing = tuple(self._missing(served, devices)) if self.watched else ()
        # An answer to the owner has a limited length: what has been decided by is left out of it.
        known = dataclasses.replace(served, waiting=(), not_waited_for=(), workers=(), lacks=None)
        return dataclasses.replace(known, round=last, missing=missing, clusters=clusters)

    def _missing(self, served: RunStatus, devices: Mapping[str, DeviceStatus]) -> list[MissingDevice]:
        found = []
        for name in served.waiting:
            device = devices.get(name)
            if device is None:
                continue
            reason, advice = device.reason, device.advice
            if not reason:
                until = "" if served.deadline_at_s is None else f": the deadline is {second(served.deadline_at_s)}"
                reason, advice = "has not uploaded yet", f"wait{until}"
            found.append(MissingDevice(name, served.since_s if device.online else device.since_s, reason, advice))
        return found

    def _skew(self) -> int:
        """Return by how many seconds most clocks of at least three devices are ahead of ours (behind: negative); 0 if not."""
        known = [d.clock_ahead_s for d in self.heard.values() if d.online and d.clock_ahead_s is not None]
        middle = round(statistics.median(known)) if len(known) > 2 else 0
        off = sum(abs(ahead_s - middle) <= CLOCK_OFF_S for ahead_s in known)
        return middle if abs(middle) > CLOCK_OFF_S and 2 * off > len(known) else 0


def _ended(live: LiveFacts) -> Problem:
    """Return how a daemon that does not run any more has ended."""
    if live.ended_at_s is None:
        return Problem("the aggregator ended without a word: it was killed, or the machine stopped", START_HINT)
    if live.error:
        return Problem(f"the aggregator ended: {live.error}", live.hint or START_HINT)
    return Problem("the aggregator was stopped", START_HINT)


def _ahead(seconds: int) -> str:
    return f"{span(abs(seconds))} {'ahead of' if seconds > 0 else 'behind'}"


def _clusters(stored: StoredRun, devices: Mapping[str, DeviceStatus]) -> list[ClusterStatus]:
    members: dict[int, list[str]] = {}
    for device, cluster in sorted(stored.clusters.items()):
        if device in devices:
            members.setdefault(cluster, []).append(device)
    found = []
    for cluster, names in sorted(members.items()):
        tests = [stored.tests[name] for name in names if name in stored.tests]
        tested = sum(test[1] for test in tests)
        accuracy = sum(test[0] for test in tests) / tested if tested else None
        found.append(ClusterStatus(cluster, tuple(names), accuracy, stored.losses.get(cluster)))
    return found
