"""One run on a transport: chunks in, rounds out. Carries out what the engine decides; owns no thread and reads no clock.

Drivers feed `on_event`, then `flush` (the group commit: everything that arrived together becomes durable together and
is acknowledged after), and `tick` with the time. The daemon does so from a queue with the real clock, the loopback
fleet with virtual time.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from aggregator.device_presence import Presences
from aggregator.inbound import PRESENCE, Inbound
from aggregator.membership import AggregatorMembership
from aggregator.numerics.backend import Backend
from aggregator.owner_inbox import OwnerMail
from aggregator.publisher import Publisher
from aggregator.revocations import Revocations
from aggregator.rounds.engine import Engine, Verdict
from aggregator.rounds.events import (
    CameOnline,
    DeadlinePassed,
    Declined,
    Event,
    Gather,
    KeysHeld,
    Left,
    OpenRound,
    Renewed,
    RolloverFailed,
    Rostered,
    RoundClosed,
    RunFinished,
    Stored,
    WentOffline,
)
from aggregator.rounds.rollover import stored_proposal
from aggregator.run_log import Lines, waiting_for
from aggregator.storage.corruption import readable
from aggregator.storage.fsync_worker import InlineSyncer, Syncer
from aggregator.storage.run_status import keep_waiting
from aggregator.storage.store import Store
from aggregator.strategies.registry import make_strategy
from aggregator.uploads.acknowledgements import Answers
from aggregator.uploads.chunk_spool import ChunkSpool
from aggregator.uploads.commit_queue import Landed, Landing
from aggregator.uploads.retransmission import Asking
from aggregator.uploads.validation import Intake, Opened, RefusedUploadError
from shoal.errors import ShoalError, UntrustedError, reason_of
from shoal.protocol.chunking import ChunkKind, parse
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPackage, RunPlan
from shoal.protocol.epochs import Epoch
from shoal.protocol.messages import Action, Obstacle, Phase
from shoal.protocol.reassembly import Reassembler, Transfer
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Connected, Disconnected, Message, Transport, TransportEvent
from shoal.util.log_throttle import Refusals

LOG = logging.getLogger("shoal.aggregator")
LOOK_S: Final = 0.2
"""How often transfers that have stalled or are too old are looked for."""


class RunService:
    """Drives one run to its end.

    Attributes:
        finished: the final round is closed and recorded. What devices still send for it is answered all the same.
        answers: what devices are told about their uploads.
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
        self._run, self._package = run, package
        self._transport = transport
        self._topics = Topics(run.fleet)
        self._store = store_factory(directory / f"run-{run.run:06d}", run)
        self._landing = Landing(self._store, syncer or InlineSyncer())
        self._engine = Engine(
            run,
            make_strategy(run, backend),
            self._store.seed,
            lambda plan: make_strategy(plan, backend),
            len(decode(package, RunPackage).task),
        )
        self._inbound = Inbound(membership, self._engine)
        self._intake = Intake(membership.identity, run)
        self._publisher = Publisher(membership.identity, membership.group, transport, directory / "retained.json")
        self.answers = Answers(self._publisher, membership, run)
        self._spool = ChunkSpool(self._store.directory)
        self._chunks = Reassembler(spool=self._spool)
        self._asking = Asking(self._chunks, self._landing, self.answers, self._publisher, membership, run)
        self._mail = OwnerMail(membership)
        self._presences = Presences(membership)
        self._revocations = Revocations(membership, self._publisher)
        self._deferred: list[Event] = []
        self._opened_at_s = 0.0
        self._lines = Lines(run, lambda line: keep_waiting(self._store.directory, line, self._lines.figures))
        self._refusals = Refusals(LOG)
        self._deadline_s: float | None = None
        self._bytes_up = 0
        self._now_s = 0.0
        self._looked_s = -math.inf
        self._lost = False
        self.finished = False
        self._roster_sent = membership.roster_bytes

    def start(self, now_s: float) -> None:
        """Subscribe, and begin the run or take it up where the store left it, also where that is behind its end."""
        self._mail.subscribe(self._transport)
        for topic_filter in (self._topics.all_up, self._topics.all_state):
            self._transport.subscribe(topic_filter)
        self._opened_at_s = now_s
        self._lines.opened(now_s)
        member = self._membership
        devices, known = member.roster.active(), (member.roster, member.roster_bytes)
        snapshot = self._store.restore()
        if snapshot is not None:
            self._take_up(snapshot.standing)
        self._publisher.roster(self._roster_sent, member.roster)
        if snapshot is not None and self._store.over():
            received = {c.device: (c.phase, digest) for c, digest in self._store.uploads(snapshot.round)}
            self._state = self._engine.over(devices, snapshot.round, snapshot.standing, received)
            self._end()
            return
        self._publisher.run(self._package)
        self._publisher.epoch(self._store.epoch())
        if snapshot is None:
            generation = member.grant.keys_since
            self._state, actions = self._engine.begin(devices, generation, *known)
            self._carry_out(actions, now_s)
            self._hold_keys(now_s)
            return
        standing = snapshot.standing
        strategy = self._engine.strategy_in(self._engine.run_in(standing))
        with readable(self._store.directory):
            before = strategy.load(snapshot.document, snapshot.vectors, self._store.fetch)
        again = self._store.uploads(snapshot.round)
        proposal = stored_proposal(standing, [contribution for contribution, _ in again])
        self._state, actions = self._engine.resume(
            devices, before, snapshot.round, snapshot.available, standing, proposal, *known
        )
        LOG.info("resumed", extra={"kv": {"run": self._run.run, "round": snapshot.round, "uploads": len(again)}})
        self._carry_out(actions, now_s)
        for contribution, digest in again:
            self._feed(Stored(contribution, digest), now_s)
        self._drop_revoked(now_s)
        self._hold_keys(now_s)

    def _take_up(self, standing: Mapping[str, Any]) -> None:
        """Put the secrets in force that the run had turned to before it was interrupted."""
        member = self._membership
        grant = member.newer(standing["generation"])
        if grant is not None:
            member.promote(grant)
            self._publisher.regroup(member.group)
        elif standing["rollover"] is not None:
            self._turn_to(standing["rollover"]["generation"])

    def _turn_to(self, generation: int) -> None:
        """Speak under the broadcast key that goes with the secrets of ``generation``, from a rollover on."""
        self._membership.turn_to(generation)
        self._publisher.regroup(self._membership.group)

    def _hold_keys(self, now_s: float) -> None:
        """Let the engine know of secrets that are newer than the run's."""
        member = self._membership
        if member.next is not None:
            self._feed(KeysHeld(member.next.keys_since), now_s)

    def on_event(self, event: TransportEvent, now_s: float) -> None:
        """Take one event of the transport."""
        match event:
            case Message(topic, payload):
                try:
                    self._on_message(topic, payload, now_s)
                except ShoalError as error:
                    self._intake.count(error)
                    self._refusals.tell(topic, reason_of(error), error.hint, now_s)
            case Connected() if self._lost:  # what was published before the first connection still waits for it
                self._lost = False
                self._publisher.republish()
            case Disconnected(reason):
                self._lost = True
                self._asking.forget()
                LOG.warning("broker connection lost", extra={"kv": {"reason": reason}})
            case _:
                pass

    def _on_message(self, topic: str, payload: bytes, now_s: float) -> None:
        parsed = self._topics.parse(topic)
        if self._mail.take(topic, payload, now_s):
            self._follow_roster(now_s)
            self._hold_keys(now_s)
            return
        if not payload:
            return
        if parsed.kind in (TopicKind.STATE, TopicKind.UP):
            self._revocations.look(parsed.device, payload, now_s)
        device = self._inbound.source(parsed)
        if parsed.kind is TopicKind.STATE:
            transfer = self._chunks.add(f"{device}/state", payload, now_s, PRESENCE)
            event = None if transfer is None else self._presences.take(device, transfer)
            if event is not None:
                self._feed(event, now_s)
        elif parsed.kind is TopicKind.UP:
            self._bytes_up += len(payload)
            if self.answers.given(device, parse(payload)[0].transfer_id):
                return
            transfer = self._chunks.add(device, payload, now_s, self._inbound.allowed(device, self._state))
            if transfer is not None and transfer.kind is ChunkKind.DECLINE:
                self._feed(self._intake.declined(device, transfer, self._membership.roster), now_s)
            elif transfer is not None and transfer.kind is ChunkKind.REMINDER:
                if self._asking.is_too_soon(device, now_s):
                    return
                reminder = self._intake.reminder(device, transfer, self._membership.roster)
                self._asking.remind(reminder, self._state, now_s, self._inbound.upload_bytes(device, self._state))
            elif transfer is not None:
                self._on_upload(device, transfer, now_s)

    def _on_upload(self, device: str, transfer: Transfer, now_s: float) -> None:
        try:
            opened = self._intake.open(device, transfer, self._membership.roster)
        except RefusedUploadError as refusal:
            self.answers.reply(device, refusal.upload.round, transfer.transfer_id, Action.REFUSED, str(refusal))
            self._feed(Declined(device, refusal.upload.nonce, Obstacle.UPLOAD), now_s)
            raise
        verdict, reason = self._engine.judge(self._state, opened.upload, opened.digest)
        queued = self._landing.of(device)
        if verdict is Verdict.STORE and queued is not None:
            same = queued.digest == opened.digest
            verdict, reason = (Verdict.DUPLICATE, "") if same else (Verdict.REFUSE, "another upload came before")
        if verdict is Verdict.STORE:
            self._landing.append(opened)
        elif verdict is Verdict.DUPLICATE:
            if queued is None:
                self.answers.give(opened, Action.ACK)
        else:
            self.answers.give(opened, Action.REFUSED, reason)
            self._feed(Declined(device, opened.upload.nonce, Obstacle.UPLOAD), now_s)
            raise UntrustedError(f"upload of {device} for round {opened.upload.round}: {reason}")

    def flush(self, now_s: float) -> None:
        """Begin to make what arrived durable, unless that is under way for what came before."""
        self._now_s = now_s
        self._landing.flush(self._on_landed)

    def at(self, now_s: float) -> None:
        """Tell the time before calling what the syncer has handed back."""
        self._now_s = now_s

    def _on_landed(self, landed: Landed) -> None:
        """Let the engine see what is durable, and acknowledge it.

        The round that may open comes before the acknowledgements of the one that closes: devices wait for the former only.
        What came for the one that closes, and is not on its way to the disk yet, is refused.
        """
        for opened, contribution in landed:
            self._handle(Stored(contribution, opened.digest), self._now_s)
        for opened, _ in landed:
            self.answers.give(opened, Action.ACK)
        for opened, reason in self._landing.withdraw(self._objection):
            self.answers.give(opened, Action.REFUSED, reason)
        deferred, self._deferred = self._deferred, []
        for event in deferred:
            self._feed(event, self._now_s)
        self.flush(self._now_s)

    def tick(self, now_s: float) -> None:
        """Do what is due: deadlines, missing chunks, the line that says what a round is waiting for."""
        self._now_s = now_s
        if self._deadline_s is not None and now_s >= self._deadline_s:
            self._deadline_s = None
            self._feed(DeadlinePassed(self._state.round, self._state.step), now_s)
        if now_s - self._looked_s >= LOOK_S:  # it looks at every transfer, and a tick comes after every few messages
            self._looked_s = now_s
            self._asking.tick(self._state, now_s)
            self._chunks.expire(now_s)
        if not self.finished:
            self._lines.waiting(self._state, now_s)

    def status(self) -> str:
        """Return one line: what the run is waiting for."""
        return waiting_for(self._state)

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
        self._publisher.roster(self._roster_sent, self._membership.roster)
        LOG.info("new roster", extra={"kv": {"sequence": self._membership.roster.sequence}})
        self._feed(Rostered(self._membership.roster, self._roster_sent), now_s)
        self._drop_revoked(now_s)

    def _drop_revoked(self, now_s: float) -> None:
        for device in self._membership.roster.revoked:
            for source in (device, f"{device}/state"):
                self._chunks.drop(source)
            self._feed(Left(device), now_s)

    def _objection(self, opened: Opened) -> str | None:
        """Return why an upload is not stored any more; None where it still is."""
        verdict, reason = self._engine.judge(self._state, opened.upload, opened.digest)
        return None if verdict is Verdict.STORE else reason

    def _feed(self, event: Event, now_s: float) -> None:
        """Let the engine see an event; none may close the round while uploads of it are on their way to the disk."""
        if self._landing.busy:
            self._deferred.append(event)
        else:
            self._handle(event, now_s)

    def _handle(self, event: Event, now_s: float) -> None:
        if isinstance(event, WentOffline):
            self._lines.left(event.device)
        elif isinstance(event, CameOnline):
            self._lines.came(event.device)
        self._state, actions = self._engine.handle(self._state, event)
        self._carry_out(actions, now_s)

    def _carry_out(self, actions: tuple[object, ...], now_s: float) -> None:
        """Carry out what the engine decided.

        A new round for which nobody was missing is announced before its snapshot is durable: the devices work while the disk
        does. After a crash in between, the uploads of the round before are still there, and closing it again gives the same bits.
        """
        closed: tuple[int, dict[str, Any]] | None = None
        for action in actions:
            match action:
                case RoundClosed(record):
                    seconds = now_s - self._opened_at_s
                    figures = {**dataclasses.asdict(record), "seconds": seconds, "bytes_up": self._bytes_up}
                    closed = (record.round, figures)
                    self._lines.closed(record, seconds, self._bytes_up)
                case OpenRound():
                    self._open(action, closed)
                    closed = None
                    self._opened_at_s, self._bytes_up = now_s, 0
                    self._lines.opened(now_s)
                    self._deadline_s = now_s + self._run.deadline_s
                case Renewed():
                    self._renew(action, closed)
                    closed = None
                case RolloverFailed(round_, reason):
                    LOG.warning("rollover failed", extra={"kv": {"round": round_, "reason": reason}})
                    dump = self._engine.strategy_in(self._state.run).dump(self._state.strategy)
                    self._store.fail(round_, (Phase.CHECKPOINT, Phase.ENDORSE), dump, self._state.standing)
                case Gather():
                    self._deadline_s = now_s + self._run.deadline_s
                case RunFinished():
                    self.finished = True
                case _:
                    raise AssertionError(action)
        if closed is not None:
            self._store.record(*closed)
        if self.finished:
            self._end()

    def _end(self) -> None:
        """Hold on to nothing but what answers the devices that are not done."""
        self.finished, self._deadline_s = True, None
        self._state = dataclasses.replace(self._state, strategy=None)
        self._store.erase()

    def _open(self, opened: OpenRound, closed: tuple[int, dict[str, Any]] | None) -> None:
        plan, run = opened.plan, self._state.run
        dump = self._engine.strategy_in(run).dump(opened.before)

        def keep() -> None:
            self._store.snapshot(plan.round, opened.available, dump, closed, self._state.standing)

        follows = not plan.step and closed is not None and not closed[1]["missing"]
        if not follows:
            # It must be found again after a crash of ours, and in a rollover the keys under which we speak with it.
            keep()
        if plan.step:
            self._turn_to(opened.generation)
        self._publisher.open_round(run, self._membership.roster, opened)
        if follows:
            keep()

    def _renew(self, renewed: Renewed, closed: tuple[int, dict[str, Any]] | None) -> None:
        """Make a mask epoch durable, hand it out, and let go of the secrets before it."""
        if closed is not None:
            self._store.record(*closed)
        run = self._engine.run_in(renewed.standing)
        dump = self._engine.strategy_in(run).dump(renewed.state)
        epoch = encode(Epoch(renewed.certificate, renewed.sealed))
        self._store.renew(renewed.round, dump, renewed.own, renewed.standing, epoch)
        self._take_up(renewed.standing)
        self._publisher.clear_models()
        self._publisher.epoch(epoch)
        LOG.info("mask epoch", extra={"kv": {"run": run.run, "round": renewed.round, "epoch": run.epoch}})

    def close(self) -> None:
        """Close the store; what is retained on the broker stays there."""
        keep_waiting(self._store.directory, "")
        self._spool.close()
        self._store.close()
