"""One run on a transport: chunks in, rounds out. Carries out what the engine decides; owns no thread and reads no clock.

Drivers feed `on_event`, then `flush` (the group commit: everything that arrived together becomes durable together and
is acknowledged after), and `tick` with the time. The daemon does so from a queue with the real clock, the loopback
fleet with virtual time.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from aggregator.damage import readable
from aggregator.engine import (
    CameOnline,
    DeadlinePassed,
    Engine,
    Event,
    Gather,
    Left,
    OpenRound,
    RoundClosed,
    RunFinished,
    Stored,
    Verdict,
    WentOffline,
)
from aggregator.intake import Intake, Opened, RefusedUploadError
from aggregator.membership import AggregatorMembership
from aggregator.numerics.backend import Backend
from aggregator.owner_mail import OwnerMail
from aggregator.publisher import Publisher
from aggregator.store import Store
from aggregator.strategies.registry import make_strategy
from aggregator.syncer import InlineSyncer, Syncer
from crypto.seal.envelope import open_from_group, read_head
from wire.codec import decode
from wire.documents import RunPlan
from wire.errors import ShoalError, UntrustedError
from wire.frame import parse
from wire.messages import Action, Presence
from wire.reassembly import Reassembler, Transfer
from wire.topics import TopicKind, Topics
from wire.transport import Connected, Disconnected, Message, Transport, TransportEvent

LOG = logging.getLogger("shoal.aggregator")
STATUS_AFTER_S: Final = 3.0
"""A round open for this long says what it is waiting for, and again each time this has passed."""
ANSWERS_REMEMBERED: Final = 4096


class RunService:
    """Drives one run to its end.

    Attributes:
        finished: the final round is closed and recorded.
    """

    def __init__(
        self,
        membership: AggregatorMembership,
        run: RunPlan,
        package: bytes,
        transport: Transport,
        directory: Path,
        *,
        backend: Backend | None = None,
        syncer: Syncer | None = None,
        store_factory: Callable[[Path, RunPlan], Store] = Store,
    ) -> None:
        self._membership = membership
        self._run = run
        self._transport = transport
        self._topics = Topics(run.fleet)
        self._store = store_factory(directory / f"run-{run.run:06d}", run)
        self._syncer = syncer or InlineSyncer()
        self._engine = Engine(run, make_strategy(run, backend), self._store.seed)
        self._intake = Intake(membership.identity, run)
        self._publisher = Publisher(membership.identity, membership.group, transport, directory / "retained.json")
        self._chunks = Reassembler()
        self._mail = OwnerMail(membership)
        self._births: dict[str, int] = {}
        self._appended: list[Opened] = []
        self._syncing: list[Opened] = []
        self._deferred: list[Event] = []
        self._answered: dict[tuple[str, bytes], Action] = {}
        self._opened_at_s = 0.0
        self._status_at_s = 0.0
        self._deadline_s: float | None = None
        self._bytes_up = 0
        self._now_s = 0.0
        self.finished = False
        self._roster_sent = membership.roster_bytes
        self._publisher.roster(self._roster_sent)
        self._publisher.run(package)

    def start(self, now_s: float) -> None:
        """Subscribe, and begin the run or take it up where the store left it."""
        self._mail.subscribe(self._transport)
        for topic_filter in (self._topics.all_up, self._topics.all_state):
            self._transport.subscribe(topic_filter)
        self._opened_at_s = now_s
        devices = self._membership.roster.active()
        snapshot = self._store.restore()
        if snapshot is None:
            self._state, actions = self._engine.begin(devices)
            self._carry_out(actions, now_s)
            return
        with readable(self._store.directory):
            before = self._engine.strategy.load(snapshot.document, snapshot.vectors, self._store.fetch)
        self._state, actions = self._engine.resume(devices, before, snapshot.round, snapshot.available)
        again = self._store.uploads(snapshot.round)
        LOG.info("resumed", extra={"kv": {"run": self._run.run, "round": snapshot.round, "uploads": len(again)}})
        self._carry_out(actions, now_s)
        for contribution, digest in again:
            self._feed(Stored(contribution, digest), now_s)
        self._drop_revoked(now_s)

    def on_event(self, event: TransportEvent, now_s: float) -> None:
        """Take one event of the transport."""
        match event:
            case Message(topic, payload):
                try:
                    self._on_message(topic, payload, now_s)
                except ShoalError as error:
                    self._intake.count(error)
                    LOG.warning("refused", extra={"kv": {"topic": topic, "reason": _reason(error)}})
            case Connected():
                self._publisher.republish()
            case Disconnected(reason):
                LOG.warning("broker connection lost", extra={"kv": {"reason": reason}})
            case _:
                pass

    def _on_message(self, topic: str, payload: bytes, now_s: float) -> None:
        parsed = self._topics.parse(topic)
        if self._mail.take(topic, payload, now_s):
            self._follow_roster(now_s)
        if not payload:
            return
        if parsed.kind is TopicKind.STATE:
            transfer = self._chunks.add(f"{parsed.device}/state", payload, now_s)
            if transfer is not None:
                self._on_presence(parsed.device, transfer, now_s)
        elif parsed.kind is TopicKind.UP:
            self._bytes_up += len(payload)
            if self._answer_again(parsed.device, payload):
                return
            transfer = self._chunks.add(parsed.device, payload, now_s)
            if transfer is not None:
                self._on_upload(parsed.device, transfer)

    def _on_presence(self, device: str, transfer: Transfer, now_s: float) -> None:
        member = self._membership.roster.device(device)
        if member is None:
            raise UntrustedError(f"{device} is not in the roster")
        head, at = read_head(transfer.payload)
        plain = open_from_group(self._membership.group, transfer.payload, head, at, member.sign_key, transfer.signed)
        presence = decode(plain, Presence)
        if (presence.fleet, presence.device) != (self._run.fleet, device):
            raise UntrustedError(f"the presence of {presence.device!r} on {device}'s topic")
        if presence.birth < self._births.get(device, 0):
            return  # the will of an earlier life
        self._births[device] = presence.birth
        self._feed(CameOnline(device) if presence.online else WentOffline(device), now_s)

    def _on_upload(self, device: str, transfer: Transfer) -> None:
        try:
            opened = self._intake.open(device, transfer, self._membership.roster)
        except RefusedUploadError as refusal:
            self._reply(device, refusal.upload.round, transfer.transfer_id, Action.REFUSED, str(refusal))
            raise
        verdict, reason = self._engine.judge(self._state, opened.upload, opened.digest)
        queued = next((o for o in (*self._syncing, *self._appended) if o.upload.device == device), None)
        if verdict is Verdict.STORE and queued is not None:
            same = queued.digest == opened.digest
            verdict, reason = (Verdict.DUPLICATE, "") if same else (Verdict.REFUSE, "another upload came before")
        if verdict is Verdict.STORE:
            self._store.append(opened.upload, opened.body, opened.norm, opened.digest)
            self._appended.append(opened)
        elif verdict is Verdict.DUPLICATE:
            if queued is None:
                self._answer(opened, Action.ACK)
        else:
            self._answer(opened, Action.REFUSED, reason)
            raise UntrustedError(f"upload of {device} for round {opened.upload.round}: {reason}")

    def _answer(self, opened: Opened, action: Action, reason: str = "") -> None:
        self._reply(opened.upload.device, opened.upload.round, opened.transfer, action, reason)

    def _reply(self, device: str, round_: int, transfer: bytes, action: Action, reason: str = "") -> None:
        member = self._membership.roster.device(device)
        if member is None:
            return
        if len(self._answered) >= ANSWERS_REMEMBERED:
            self._answered.pop(next(iter(self._answered)))
        self._answered[device, transfer] = action
        self._publisher.answer(member, self._run, round_, transfer, action, reason)

    def _answer_again(self, device: str, chunk: bytes) -> bool:
        """Repeat the answer to a device that resends what was answered, once for each time it sends the first chunk."""
        header, _ = parse(chunk)
        action = self._answered.get((device, header.transfer_id))
        if action is None:
            return False
        member = self._membership.roster.device(device)
        if header.index == 0 and member is not None:
            self._publisher.answer(member, self._run, header.round, header.transfer_id, action)
        return True

    def flush(self, now_s: float) -> None:
        """Begin to make what arrived durable, unless that is under way for what came before."""
        if self._syncing or not self._appended:
            return
        self._syncing, self._appended = self._appended, []
        self._now_s = now_s
        self._syncer.submit(self._store.prepare(), self._on_synced)

    def at(self, now_s: float) -> None:
        """Tell the time before calling what the syncer has handed back."""
        self._now_s = now_s

    def _on_synced(self) -> None:
        """Commit what is durable, let the engine see it, and acknowledge it.

        The round that may open comes before the acknowledgements of the one that closes: devices wait for the former only.
        """
        contributions = self._store.commit()
        done, self._syncing = self._syncing, []
        for opened, contribution in zip(done, contributions, strict=True):
            self._feed(Stored(contribution, opened.digest), self._now_s)
        for opened in done:
            self._answer(opened, Action.ACK)
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            self._feed(event, self._now_s)
        self.flush(self._now_s)

    def tick(self, now_s: float) -> None:
        """Do what is due: deadlines, missing chunks, the line that says what a round is waiting for."""
        self._now_s = now_s
        if self._deadline_s is not None and now_s >= self._deadline_s:
            self._deadline_s = None
            self._feed(DeadlinePassed(self._state.round), now_s)
        for stalled in self._chunks.stalled(now_s):
            member = self._membership.roster.device(stalled.source)
            if member is not None:
                self._publisher.ask_again(member, self._run, stalled.round, stalled.transfer_id, stalled.missing)
        self._chunks.expire(now_s)
        if now_s - max(self._opened_at_s, self._status_at_s) >= STATUS_AFTER_S and not self.finished:
            self._status_at_s = now_s
            LOG.info(self.status())

    def status(self) -> str:
        """Return one line: what the run is waiting for."""
        state = self._state
        if state.plan is None:
            absent = [d for d in state.devices if d not in state.online]
            there = len(state.devices) - len(absent)
            return f"gathering: {there} of {len(state.devices)} devices are here{_names(absent)}"
        done, total = len(state.received), len(state.plan.orders)
        return f"round {state.round}: {done} of {total}{_names(list(state.waiting))}"

    def reload_roster(self) -> None:
        """Take up a newer roster that was carried into the directory by hand.

        Raises:
            UntrustedError: it is older than one seen before, or not the owner's.
        """
        self._membership.reload()
        self._follow_roster(self._now_s)

    def _follow_roster(self, now_s: float) -> None:
        """Hand the newest roster on to the devices, and let go of those that it revokes."""
        if self._membership.roster_bytes == self._roster_sent:
            return
        self._roster_sent = self._membership.roster_bytes
        self._publisher.roster(self._roster_sent)
        LOG.info("new roster", extra={"kv": {"sequence": self._membership.roster.sequence}})
        self._drop_revoked(now_s)

    def _drop_revoked(self, now_s: float) -> None:
        for device in self._membership.roster.revoked:
            self._feed(Left(device), now_s)

    def _feed(self, event: Event, now_s: float) -> None:
        """Let the engine see an event; none may close the round while uploads of it are on their way to the disk."""
        if self._syncing:
            self._deferred.append(event)
            return
        self._state, actions = self._engine.handle(self._state, event)
        self._carry_out(actions, now_s)

    def _carry_out(self, actions: tuple[object, ...], now_s: float) -> None:
        """Carry out what the engine decided.

        A new round is announced before its snapshot is durable: the devices work while the disk does. After a crash in
        between, the uploads of the round before are still there, and closing it again gives the same bits.
        """
        closed: tuple[int, dict[str, Any]] | None = None
        for action in actions:
            match action:
                case RoundClosed(record):
                    seconds = now_s - self._opened_at_s
                    figures = {**dataclasses.asdict(record), "seconds": seconds, "bytes_up": self._bytes_up}
                    closed = (record.round, figures)
                    self._report(action, seconds)
                case OpenRound(plan, _, before, available):
                    self._publisher.open_round(self._run, self._membership.roster, action)
                    self._store.snapshot(plan.round, available, self._engine.strategy.dump(before), closed)
                    closed = None
                    self._opened_at_s, self._bytes_up = now_s, 0
                    self._deadline_s = now_s + self._run.deadline_s
                case Gather():
                    self._deadline_s = now_s + self._run.deadline_s
                case RunFinished():
                    self.finished = True
                    self._deadline_s = None
                case _:
                    raise AssertionError(action)
        if closed is not None:
            self._store.record(*closed)
        if self.finished:
            self._store.erase()

    def _report(self, closed: RoundClosed, seconds: float) -> None:
        r = closed.record
        sizes = sorted((list(r.clusters.values()).count(c) for c in set(r.clusters.values())), reverse=True)
        pairs = {
            "run": self._run.run,
            "round": r.round,
            "devices": f"{r.contributed}/{r.ordered}",
            "loss": r.loss,
            "cluster_sizes": "+".join(map(str, sizes)),
            "dur_s": seconds,
            "bytes": self._bytes_up,
        }
        if r.tested:
            pairs["accuracy"] = r.correct / r.tested
        LOG.info("round closed", extra={"kv": pairs})
        for event in r.events:
            LOG.info(str(event["kind"]), extra={"kv": {k: v for k, v in event.items() if k not in ("kind",)}})

    def close(self) -> None:
        """Close the store; what is retained on the broker stays there."""
        self._store.close()


def _names(devices: list[str], most: int = 5) -> str:
    if not devices:
        return ""
    shown = ", ".join(devices[:most])
    more = f" and {len(devices) - most} more" if len(devices) > most else ""
    return f", waiting for {shown}{more}"


def _reason(error: ShoalError) -> str:
    cause = error.__cause__
    return f"{error}: {cause}" if cause is not None else str(error)
