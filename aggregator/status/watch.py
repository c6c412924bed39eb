"""The facts that `status` needs: recorders, which outlive the runs that the daemon serves, and `run_facts` of the served run."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Mapping
from typing import Final

from aggregator.rounds.quorum_and_deadline import is_paused, members, online_needed, shortage, uploads_needed
from aggregator.rounds.state import WORDS, EngineState, RunPhase, not_waited_for, phase_of
from aggregator.run_log import awaited_keys
from aggregator.status.facts import ConnectionFacts, DeviceStatus, RunStatus
from shoal.protocol.messages import DeclineReason, ModelsHeld, Presence
from shoal.transport.base import Connected, Disconnected, TransportEvent, Unreached

SETTLED_S: Final = 10.0
"""Time after a connection during which presences may be late: the broker first sends its queue."""


VERSION_FORM: Final = re.compile(r"[0-9A-Za-z.+-]{1,32}", re.ASCII)
"""A version of another form is not recorded: a device could send escape sequences for the operator's terminal."""

MOST_REASON: Final = 300
"""Most characters of the reason why a device's message was refused; it may quote the message."""


class DeviceWatch:
    """Records facts from the devices' messages.

    Args:
        clock: returns unix seconds.
        known: facts of an earlier daemon, of which the times are taken over: its presences are no longer true.
    """

    def __init__(self, clock: Callable[[], float] = time.time, known: Mapping[str, DeviceStatus] | None = None) -> None:
        self._clock = clock
        self._devices = {
            name: dataclasses.replace(facts, online=None, since_s=None, declined="", refused="")
            for name, facts in (known or {}).items()
        }

    @property
    def devices(self) -> Mapping[str, DeviceStatus]:
        """The facts by device; a copy."""
        return dict(self._devices)

    def came(self, presence: Presence, *, retained: bool, settled: bool) -> None:
        """Record a verified presence: online or offline.

        Args:
            presence: the message.
            retained: whether the broker had stored it before we subscribed: then its time says nothing.
            settled: whether it can't be late because it was queued at the broker.
        """
        facts = self._of(presence.device)
        changed = facts.online is not presence.online
        now_s = self._now_s()
        if changed:
            facts = dataclasses.replace(facts, online=presence.online, since_s=None if retained else now_s)
            if presence.online:
                facts = dataclasses.replace(facts, declined="", refused="")
        if not presence.online:  # also a will, which the broker sends: the device itself was heard earlier
            self._devices[presence.device] = facts
            return
        ahead_s = presence.sent_at_s - now_s
        # A message may arrive late, but never early.
        measured = not retained and presence.sent_at_s > 0 and (settled or ahead_s > 0)
        self._devices[presence.device] = dataclasses.replace(
            facts,
            version=presence.version if VERSION_FORM.fullmatch(presence.version) else "",
            wire=presence.wire,
            last_seen_s=facts.last_seen_s if retained else now_s,
            clock_ahead_s=ahead_s if measured else facts.clock_ahead_s,
            model_run=presence.answers,
            left_out=presence.left_out,
            doubted=presence.doubted,
            vitals=presence.vitals,
            vitals_at_s=None if presence.vitals is None else presence.sent_at_s,
        )

    def went(self, device: str) -> None:
        """Record that a device is not there, without a presence that could be opened."""
        facts = self._of(device)
        if facts.online is not False:
            self._devices[device] = dataclasses.replace(facts, online=False, since_s=self._now_s())

    def uploaded(self, device: str, *, leaving: bool = False) -> None:
        """Record that an upload of a device is durable, and so that the device is there.

        Args:
            device: its name.
            leaving: whether a word that it is offline arrived meanwhile: then it is away since now.
        """
        facts, now_s = self._of(device), self._now_s()
        if facts.online is not True:
            facts = dataclasses.replace(facts, online=not leaving, since_s=now_s)
        self._devices[device] = dataclasses.replace(facts, last_seen_s=now_s, last_upload_s=now_s, declined="")

    def declined(self, device: str, reason: DeclineReason) -> None:
        """Record that a device declined a round, or that its upload was refused."""
        self._devices[device] = dataclasses.replace(
            self._of(device), last_seen_s=self._now_s(), declined=reason.name.lower()
        )

    def refused(self, device: str, reason: str) -> None:
        """Record that a device has signed a false message."""
        self._devices[device] = dataclasses.replace(self._of(device), refused=reason[:MOST_REASON])

    def _of(self, device: str) -> DeviceStatus:
        return self._devices.get(device) or DeviceStatus(name=device)

    def _now_s(self) -> int:
        return int(self._clock())


class ConnectionWatch:
    """Records the state of the connection to the broker.

    Args:
        broker: its address, without user and password.
        clock: returns unix seconds.

    Attributes:
        facts: the newest.
    """

    def __init__(self, broker: str, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self.facts = ConnectionFacts(broker=broker, connected=False, since_s=int(clock()))

    def expires(self, found: Mapping[str, int]) -> None:
        """Record when the certificates of this client expire: name -> unix seconds."""
        self.facts = dataclasses.replace(self.facts, expires=found)

    @property
    def settled(self) -> bool:
        """Whether the connection stands for SETTLED_S."""
        return self.facts.connected and self._clock() - self.facts.since_s >= SETTLED_S

    def sends(self, chunk_bytes: int) -> None:
        """Record the largest chunk that is sent now."""
        self.facts = dataclasses.replace(self.facts, chunk_bytes=chunk_bytes)

    def on_event(self, event: TransportEvent) -> None:
        """Take an event of the transport; messages are ignored."""
        now_s = int(self._clock())
        if isinstance(event, Connected):
            expires = {**self.facts.expires, **({"broker": event.expires_at_s} if event.expires_at_s else {})}
            self.facts = dataclasses.replace(self.facts, connected=True, since_s=now_s, reason="", expires=expires)
        elif isinstance(event, Unreached):
            self.facts = dataclasses.replace(self.facts, reason=event.reason)
        elif isinstance(event, Disconnected) and self.facts.connected:
            reason = event.reason or "the connection ended"
            self.facts = dataclasses.replace(self.facts, connected=False, since_s=now_s, reason=reason, lost_s=now_s)


class FleetWatch:
    """Records facts about the broker and the devices.

    Args:
        broker: the broker's address, without user and password.
        clock: returns unix seconds.
        known: see `DeviceWatch`.

    Attributes:
        clock: as given.
        connection, devices: the recorders.
        births: signature key of a device -> its newest incarnation (`Presence.birth`).
        held: device -> the models of a standing order's run that it holds, by its newest presence.
    """

    def __init__(
        self, broker: str = "", clock: Callable[[], float] = time.time, known: Mapping[str, DeviceStatus] | None = None
    ) -> None:
        self.clock = clock
        self.connection = ConnectionWatch(broker, clock)
        self.devices = DeviceWatch(clock, known)
        self.births: dict[bytes, int] = {}
        self.held: dict[str, ModelsHeld] = {}

    def came(self, presence: Presence, *, retained: bool) -> None:
        """Record a verified presence."""
        if presence.held is not None:
            self.held[presence.device] = presence.held
        self.devices.came(presence, retained=retained, settled=self.connection.settled)


def run_facts(state: EngineState, *, since_s: int, deadline_at_s: int | None, computing: bool = False) -> RunStatus:
    """Return the facts of a run.

    Args:
        state: of the engine.
        since_s: unix seconds since when the open round, or the gathering, lasts.
        deadline_at_s: unix seconds at which it is over; None if there is no deadline.
        computing: whether the round is being closed: then it waits for no device.
    """
    phase, short = phase_of(state), None if computing else shortage(state)
    waiting: tuple[str, ...] = ()
    quorum = received = 0
    too_small = short is not None and not short.late
    if is_paused(state) or too_small:
        deadline_at_s = None  # the run waits for the owner, and no device is late
    if phase is RunPhase.GATHERING and not is_paused(state):
        waiting = tuple(sorted(members(state) - state.online))
        quorum, received = online_needed(state), len(state.online)
    elif phase in (RunPhase.ROUND, RunPhase.FINAL):
        waiting = () if computing else tuple(d for d in state.waiting if d in state.devices)
        quorum, received = uploads_needed(state), len(state.received)
    return RunStatus(
        run=state.run.run,
        algorithm=state.run.recipe.algorithm,
        rounds=state.run.recipe.rounds,
        phase=phase.value,
        round=state.round,
        since_s=since_s,
        deadline_at_s=None if phase is RunPhase.FINISHED else deadline_at_s,
        deadline_passed=state.deadline_passed and not too_small,
        quorum=quorum,
        received=received,
        waiting=waiting,
        not_waited_for=not_waited_for(state),
        obstacle="" if is_paused(state) else awaited_keys(state),
        order=WORDS[state.order],
        computing=computing,
        shortage="" if short is None else short.reason,
        advice="" if short is None else short.hint,
    )
