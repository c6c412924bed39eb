"""One run on a transport: hands messages in, drives the engine, and carries out its decisions.

The service owns no thread and reads no clock. A driver calls `on_event` for each event of the transport, then `flush`
(group commit: uploads that arrived together become durable together), and `tick` with the time. The daemon does so from a
queue with the real clock, the loopback fleet in virtual time.

Events of the engine wait in one queue, each until the uploads that arrived before it are durable or refused. If the close of a
round takes long, it is computed on a thread of the run's workers: the service goes on answering devices, and events wait until
the round is closed. After a crash in between the round closes again from its durable uploads, with the same result.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

from aggregator.inbound import ODD_HINT, DevicePresence, Inbound, odd_history
from aggregator.membership import AggregatorMembership, FalseMessageError
from aggregator.numerics.backend import Backend
from aggregator.numerics.checks import NumericsError
from aggregator.owner_inbox import OwnerInbox
from aggregator.publisher import LEDGER_FILE, Publisher, Revocations
from aggregator.rounds.engine import Engine
from aggregator.rounds.held_models import HeldModels
from aggregator.rounds.snapshot import dump, load
from aggregator.rounds.state import (
    WORDS,
    CameOnline,
    DeadlinePassed,
    Declined,
    EngineEvent,
    EngineState,
    Gather,
    KeysHeld,
    Left,
    OpenRound,
    Order,
    Ordered,
    Rostered,
    RoundClosed,
    RunFinished,
    Transition,
    WentOffline,
)
from aggregator.run_log import RunLog, waiting_for
from aggregator.shards.calculation import JobLink, Shards, ShardsUnavailableError
from aggregator.shards.coordinator import READ_TOPICS, WorkerMessages, waiting_words
from aggregator.status.facts import RunStatus
from aggregator.status.watch import FleetWatch, run_facts
from aggregator.storage.means import StoredMean
from aggregator.storage.store import Store, readable
from aggregator.strategies.base import ClientUpdate, Looking, inner_of
from aggregator.strategies.registry import make_strategy
from aggregator.sums import CellOpener, KeeperAwaitedError
from aggregator.uploads.uploads import Uploads
from aggregator.workers import RunWorkers
from shoal.errors import ShoalError, UsageError
from shoal.membership.roster_changes import ReplacedError
from shoal.protocol.cells import CellSums
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPackage, RunPlan
from shoal.protocol.jobs import PartReport
from shoal.protocol.messages import DeclineReason
from shoal.protocol.states import NO_TRANSCRIPT
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Connected, Disconnected, Message, Transport, TransportEvent
from shoal.util.log_throttle import Refusals

LOG = logging.getLogger("shoal.aggregator")
LOOK_S: Final = 0.2
"""Interval between two searches for stalled and expired transfers."""
ANNOUNCE_AGAIN_S: Final = 60.0
"""Time from the announcement of a round until it is sent once more to each device that it waits for; then twice as long."""
AGAIN_S: Final = 1.0
"""Time until a close is repeated that a worker has interrupted."""
UNCLOSABLE_HINT: Final = (
    "take the run's file out of the aggregator's runs directory, and have the owner sign another run, of another algorithm "
    "or with a smaller --participation"
)
KEEPER_AGAIN_S: Final = 15.0
"""Time until the keeper is asked again."""
LONG_WORK: Final = 4_000_000_000
"""Least work (`Engine.closing_work`) of a close that is computed on another thread: some 40 ms of one core. The rounds of 100
devices with 159,010 coordinates take less, those of 500 devices more."""


class RunService:
    """Drives one run to its end.

    Attributes:
        plan: the owner's run plan.
        state: the engine's; there is none before `start`.
        finished: whether the final round is closed and recorded. Uploads and reminders are answered even then.
        uploads: the run's uploads.
        computing: whether a round is being closed on another thread.
        obstacle: why the open round can never be closed; empty if it can.
        odd: that devices have signed another history than this aggregator's, see `odd_history`; empty if they have not.
        watch: records what is heard of the broker and the devices, for `shoal-aggregator status`.
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
        workers: RunWorkers | None = None,
        store_factory: Callable[[Path, RunPlan], Store] = Store,
        watch: FleetWatch | None = None,
        order: Order = Order.GO,
        link: Callable[[WorkerMessages], JobLink] | None = None,
    ) -> None:
        """Open the run's store.

        Args:
            membership: of the aggregator.
            run: the owner's plan.
            package: the run package.
            transport: client of the broker.
            directory: the aggregator's.
            backend: computes similarities; numpy if None.
            workers: threads; None does all work at once.
            store_factory: makes the store.
            watch: records what is heard.
            order: of the owner.
            link: carries jobs to the plan's workers, if it has any.

        Raises:
            UsageError: the plan has workers, and there is no link to them.
        """
        self._order = order
        workers = workers or RunWorkers()
        self._numerics = workers.numerics
        self.watch = watch or FleetWatch()
        self._membership = membership
        self.plan = run
        self.state: EngineState
        self._transport = transport
        self._topics = Topics(run.fleet)
        self._store = store_factory(directory / f"run-{run.run:06d}", run)
        average, parts = StoredMean(run, backend, self._store.directory), decode(package, RunPackage)
        self._package = package if not parts.deals else encode(dataclasses.replace(parts, deals=()))
        self._before = parts.before, parts.transcript
        self._engine = Engine(
            run,
            make_strategy(run, backend, average),
            self._store.seed,
            len(parts.task),
            average,
        )
        self._shards: Shards | None = None
        self._long_work = LONG_WORK if run.keeper is None else 1
        signed = encode(dataclasses.replace(parts, task=b"", origins=b"", deals=()))
        self._messages = WorkerMessages(
            run,
            membership,
            transport,
            self._on_report,
            signed,
            on_sums=self._on_sums,
            clock=self.watch.clock,
        )
        self._opener = self._engine.opener = self._opener_of(parts)
        if run.workers:
            if link is None:
                raise UsageError(
                    f"run {run.run} has {len(run.workers)} workers",
                    hint=f"start the aggregator with torchrun --nproc-per-node {len(run.workers) + 1}",
                )
            self._shards = self._store.space = Shards(run, link(self._messages))
            self._long_work = 1
        self._again: tuple[EngineState, EngineState] | None = None
        self._again_s = -math.inf
        self._publisher = Publisher(
            membership.identity, membership.group, transport, directory / LEDGER_FILE, workers.intake
        )
        self._inbound = Inbound(membership, self._engine, self._store.directory)
        self.uploads = Uploads(
            run,
            membership,
            engine=self._engine,
            driver=self,
            inbound=self._inbound,
            store=self._store,
            workers=workers,
            publisher=self._publisher,
        )
        self._mail = OwnerInbox(membership)
        self._presences = DevicePresence(membership, self.watch, run.wire)
        self._revocations = Revocations(membership, self._publisher)
        self._events: deque[tuple[int, EngineEvent]] = deque()
        self.computing = False
        self.obstacle = self.odd = ""
        self._opened_at_s = 0.0
        self._lines = RunLog(run)
        self._refusals = Refusals(LOG)
        self._deadline_s: float | None = None
        self._since_s = int(self.watch.clock())
        self._bytes_up = 0
        self._now_s = 0.0
        self._looked_s = -math.inf
        self._announced_s, self._announce_pause_s = 0.0, ANNOUNCE_AGAIN_S
        self._lost = False
        self._said = ""
        self.finished = False
        self._roster_sent = membership.roster_bytes
        self._members = membership.roster.only(run.recipe.only)

    @property
    def _without_keeper(self) -> bool:
        """Whether the owner has stopped a run with a keeper at once: its rounds close without the keeper."""
        return self._opener is not None and self._order is Order.STOP_NOW

    def _opener_of(self, parts: RunPackage) -> CellOpener | None:
        """Return what opens the sums of a run with a keeper, and lets its strategy look; None for another run."""
        if self.plan.keeper is None:
            return None
        opener = CellOpener(
            self.plan,
            encode(dataclasses.replace(parts, task=b"", origins=b"", deals=())),
            self._store.directory,
            lambda: self._membership.roster,
            self._messages.ask_keeper,
        )
        strategy = inner_of(self._engine.strategy)
        if self.plan.looks and isinstance(strategy, Looking):
            strategy.look = opener.look_with(parts.deals, self._membership)
        return opener

    def start(self, now_s: float) -> None:
        """Subscribe, and begin the run or resume it from the store. For a finished run, only acknowledge late uploads."""
        self._now_s = now_s
        self._mail.subscribe(self._transport)
        for kind in (TopicKind.UP, TopicKind.STATE):
            self._transport.subscribe(self._topics.filter(kind))
        self._messages.subscribe()
        self._opened_at_s = now_s
        self._lines.opened(now_s)
        member = self._membership
        devices = self._members.active()
        snapshot = self._store.restore()
        # Before anything is published, since it is sealed under the keys in force.
        if snapshot is not None:
            self._use_version(snapshot.metadata.key_version)
        self._publisher.roster(self._roster_sent, member.roster)
        if snapshot is not None and self._store.over():
            received = self._store.received(snapshot.round)
            self.state = self._engine.over(devices, snapshot.round, snapshot.metadata, received)
            self._end()
            return
        self._publisher.run(self._package)
        self._package = b""
        if snapshot is None:
            self.state, actions = self._engine.begin(devices, member.grant.keys_since, self._members)
            self._carry_out(actions)
            self._obey(self._order)
            self._hold_keys()
            return
        with readable(self._store.directory):
            before, held = load(self._engine.strategy.state_type, snapshot.document, snapshot.vectors)
        again = self._store.uploads(snapshot.round)
        self.state, actions = self._engine.resume(
            devices, before, held, snapshot.round, snapshot.available, snapshot.metadata, self._members
        )
        LOG.info("resumed", extra={"kv": {"run": self.plan.run, "round": snapshot.round, "uploads": len(again)}})
        self._carry_out(actions)
        # Before the uploads, which may close the round; but a stop at once must not close it without them.
        self._obey(Order.STOP if self._order.stops else self._order)
        if again:
            self._handle(*again)
        self._obey(self._order)
        self._drop_revoked()
        self._hold_keys()

    def obey(self, order: Order, now_s: float) -> None:
        """Put an order of the owner in force; the caller has made it durable."""
        self._now_s, self._order = now_s, order
        self._obey(order)
        if self._without_keeper and self._again_s < math.inf:
            # The close that waits for the keeper, which may be lost, goes on without it.
            self._again_s = now_s
            self._close_again(now_s)

    def _obey(self, order: Order) -> None:
        if WORDS[order] != self._said:
            words = WORDS[order] or "resumed by the owner"
            LOG.info(f"run {words}", extra={"kv": {"run": self.plan.run, "round": self.state.round}})
        self._said = WORDS[order]
        # No device takes part in the final round of another history: the daemon drops such a run.
        if not self.finished and not (self.odd and order.stops):
            self.feed(Ordered(order))

    def _use_version(self, version: int) -> None:
        """Put the secrets of a key version in force if they are newer."""
        member = self._membership
        grant = member.newer(version)
        if grant is not None:
            member.promote(grant)
            self._publisher.regroup(member.group)

    def _hold_keys(self) -> None:
        """Tell the engine about secrets that are newer than the run's, if there are any."""
        member, run = self._membership, self.plan
        if member.next is not None:
            self.feed(KeysHeld(member.next.keys_since))
        if run.follows and run.key_version != member.roster.keys_since and not self.state.held.closed:
            # Devices that had not begun it by now never will. The order's next turn is under the newer keys.
            LOG.warning(
                "run dropped: the owner has drawn new keys before its first round", extra={"kv": {"run": run.run}}
            )
            self.feed(Ordered(Order.STOP_NOW))

    def on_event(self, event: TransportEvent, now_s: float) -> None:
        """Handle one event of the transport; a message that is refused is logged and changes nothing else.

        Raises:
            ReplacedError: the owner has put another aggregator in the place of this one.
        """
        self._now_s = now_s
        self.watch.connection.on_event(event)
        match event:
            case Message(topic, payload, retained):
                try:
                    self._on_message(topic, payload, retained=retained)
                except ReplacedError:
                    raise
                except ShoalError as error:
                    if isinstance(error, FalseMessageError):
                        self._on_false(error, topic)
                    self._refusals.tell(topic, error, now_s)
            case Connected() if self._lost:  # messages published before the first connection are still queued
                self._lost = False
                # The broker may have lost presences that were queued for us; what it retains is newer than those that it has.
                self._transport.subscribe(self._topics.filter(TopicKind.STATE))
                self._publisher.republish()
            case Disconnected(reason):
                self._lost = True
                self.uploads.on_disconnect()
                LOG.warning("broker connection lost", extra={"kv": {"reason": reason}})

    def _on_false(self, error: FalseMessageError, topic: str) -> None:
        """Name the device that has signed a false message; a false answer to the open round is as good as none."""
        self.watch.devices.refused(error.device, str(error))
        if topic == self._topics.up(error.device):
            self.feed(Declined(error.device, self._engine.nonce(self.state.round), DeclineReason.UPLOAD))

    def _on_message(self, topic: str, payload: bytes, *, retained: bool) -> None:
        now_s, parsed = self._now_s, self._topics.parse(topic)
        if self._mail.take(topic, payload, now_s):
            self._follow_roster()
            self._hold_keys()
            return
        if not payload:
            return
        if parsed.kind in (TopicKind.STATE, TopicKind.UP):
            self._revocations.look(parsed.device, payload, now_s)
        if parsed.kind in READ_TOPICS:
            self._messages.take(parsed, payload, now_s)
            self.on_progress()
            return
        device = self._inbound.source(parsed)
        if parsed.kind is TopicKind.UP:
            self._bytes_up += len(payload)
            self.uploads.receive(device, payload, now_s)
            return
        transfer = self._inbound.presence(device, payload, now_s)
        event = None if transfer is None else self._presences.take(device, transfer, retained=retained)
        if isinstance(event, CameOnline):
            event = dataclasses.replace(event, origins=self._origins_of(device))
        if event is not None and self._members.device(device) is not None:
            self.feed(event)

    def _origins_of(self, device: str) -> tuple[int, ...]:
        """Return the origins of a later run of a standing order that a device holds: models of the run before, or of this one."""
        held = self.watch.held.get(device)
        here = (self.plan.run, NO_TRANSCRIPT), self._before
        return () if held is None or (held.run, held.transcript) not in here else held.own

    def flush(self, now_s: float) -> None:
        """Start to commit the uploads that arrived, unless a commit is already under way."""
        self._now_s = now_s
        self.uploads.flush()

    def at(self, now_s: float) -> None:
        """Set the time, before a callback of the workers is called."""
        self._now_s = now_s

    def tick(self, now_s: float) -> None:
        """Do the work that is due: the deadline, missing chunks, the log line about the devices that a round waits for."""
        self._now_s = now_s
        if self._deadline_s is not None and now_s >= self._deadline_s:
            self._deadline_s = None
            self.feed(DeadlinePassed(self.state.round))
            if self._deadline_s is None and self.state.plan is not None:  # it still waits, and each deadline counts
                self._deadline_s = now_s + self.plan.recipe.deadline_s
        self._close_again(now_s)
        if now_s - self._looked_s >= LOOK_S:  # not on every tick: it looks at all transfers
            self._looked_s = now_s
            self.uploads.tick(now_s)
            self._compare_histories()
        self._announce_again(now_s)
        if not self.finished:
            lost = bool(self.watch.connection.facts.reason)
            workers = self.obstacle or self.odd or self.waits_for_workers
            self._lines.waiting(self.state, now_s, lost=lost, computing=self.computing, workers=workers)

    def _announce_again(self, now_s: float) -> None:
        """Send the announcement to the devices that the round waits for, if that is due: their subscription may be lost."""
        if now_s - self._announced_s < self._announce_pause_s or self.finished or self.computing:
            return
        self._announced_s, self._announce_pause_s = now_s, 2 * self._announce_pause_s
        state = self.state
        silent = [d for d in state.waiting if d in state.online and d not in state.unable]
        if silent:
            self._publisher.announce_again(silent, state.round)

    def status(self) -> str:
        """Return one line that says what the run is waiting for."""
        return self.obstacle or self.odd or self.waits_for_workers or waiting_for(self.state, computing=self.computing)

    def _compare_histories(self) -> None:
        """Say once that this aggregator's own history of the run is the odd one, if enough devices have signed another."""
        odd, before = odd_history(self.state, self._presences.heads), self.odd
        self.odd = odd
        if odd and not before:
            LOG.error("this aggregator's history is the odd one", extra={"kv": {"reason": odd, "hint": ODD_HINT}})

    @property
    def waits_for_workers(self) -> str:
        """What the open round waits for at the workers; empty if it waits for none of them."""
        if self.finished:
            return ""
        words = waiting_words(self.plan, self._messages.absent, self.uploads.lacks)
        if not words and self.computing and self._opener is not None and not self._opener.answered:
            return f"round {self.state.round} waits for the keeper's answer"
        return words

    def facts(self) -> RunStatus:
        """Return the facts of the run for `shoal-aggregator status`."""
        deadline_at_s = self._since_s + int(self.plan.recipe.deadline_s)
        facts = run_facts(self.state, since_s=self._since_s, deadline_at_s=deadline_at_s, computing=self.computing)
        if not self.finished:
            workers, said = self._messages.facts(self.uploads.lacks), self._lines
            facts = dataclasses.replace(facts, workers=workers, line=said.line, lacks=said.figures or None)
        if self.obstacle:
            return dataclasses.replace(facts, computing=False, shortage=self.obstacle, advice=UNCLOSABLE_HINT)
        if self.odd:
            return dataclasses.replace(facts, shortage=self.odd, advice=ODD_HINT, waiting=(), not_waited_for=())
        return facts

    def reload_roster(self) -> None:
        """Adopt a newer roster that was copied into the directory by hand.

        Raises:
            UntrustedError: it is older than one seen before, or not the owner's.
        """
        self._membership.reload()
        self._follow_roster()

    def _on_report(self, report: PartReport) -> None:
        self.uploads.on_report(report)

    def _follow_roster(self) -> None:
        """Publish the newest roster, and drop the devices that it revokes, replaces, or takes out of this run."""
        if self._membership.roster_bytes == self._roster_sent:
            return
        roster, before = self._membership.roster, self._members
        self._roster_sent = self._membership.roster_bytes
        self._members = roster.only(self.plan.recipe.only)
        self._publisher.roster(self._roster_sent, roster)
        LOG.info("new roster", extra={"kv": {"sequence": roster.sequence}})
        self.feed(Rostered(self._members))
        self._drop_revoked()
        for device in before.active():
            member = self._members.device(device)
            if member is not None and member != before.device(device):
                self._drop(device)  # replaced: the one that has its name now is a newcomer
        if self.plan.recipe.only:
            # Devices that have the run's label only now are connected already.
            self._transport.subscribe(self._topics.filter(TopicKind.STATE))

    def _drop_revoked(self) -> None:
        for device in self._members.revoked:
            self._drop(device)

    def _drop(self, device: str) -> None:
        self._inbound.drop(device)
        self.feed(Left(device))

    def feed(self, event: EngineEvent) -> None:
        """Let the engine handle an event once it has seen the uploads that arrived before it, and no round is being closed."""
        self._events.append((self.uploads.newest, event))
        self.on_progress()

    def on_progress(self) -> None:
        """Let the engine handle the events that nothing holds back any more, in order."""
        while self._events and not self.computing and not self.uploads.holds_back(self._events[0][0]):
            self._handle(self._events.popleft()[1])

    def on_committed(self, updates: Sequence[ClientUpdate]) -> None:
        """Let the engine handle uploads that have just become durable: signs of life, unless the device has left meanwhile."""
        left = {event.device for _, event in self._events if isinstance(event, WentOffline)}
        uploaders = [update.device for update in updates]
        for device in uploaders:
            self.watch.devices.uploaded(device, leaving=device in left)
        here = [
            CameOnline(d)
            for d in uploaders
            if d not in left and d not in self.state.online and self._members.device(d) is not None
        ]
        self._handle(*here, *updates)

    def on_refused(self, device: str, error: ShoalError) -> None:
        """Log that an upload is not used, and name a device that has signed a false one."""
        if isinstance(error, FalseMessageError):
            self._on_false(error, self._topics.up(device))
        self._refusals.tell(self._topics.up(device), error, self._now_s)

    def _handle(self, *events: EngineEvent) -> None:
        """Let the engine handle events that happened together; a long close goes on on another thread."""
        for event in events:
            if isinstance(event, WentOffline):
                self._lines.left(event.device)
            elif isinstance(event, CameOnline):
                self._lines.came(event.device)
            elif isinstance(event, Declined):
                self.watch.devices.declined(event.device, event.reason)
        before = self.state
        recorded = self._engine.record(before, events)
        work = self._engine.closing_work(recorded)
        if work < self._long_work:
            self._move(*self._engine.advance(before, recorded))
            return
        self.state, self.computing = recorded, True
        self._close(before, recorded)

    def _close(self, before: EngineState, recorded: EngineState) -> None:
        """Close the round on a worker's thread; the plan's workers may be missing, or be lost on the way."""
        if self._shards is not None:
            self._shards.round = recorded.round
        if self._opener is not None:
            self._opener.given_up = self._without_keeper

        def advance() -> Transition | ShardsUnavailableError | NumericsError:
            try:
                return self._engine.advance(before, recorded)
            except (ShardsUnavailableError, NumericsError) as error:
                return error

        self._again = before, recorded
        self._again_s = math.inf
        self._numerics.submit(advance, self._on_computed)

    def _on_sums(self, told: CellSums, body: memoryview) -> None:
        """Continue the close that waits for the keeper's answer."""
        if self._opener is None:
            return
        self._opener.take(told, body)
        if self._again_s < math.inf:  # no close is under way
            self._again_s = self._now_s
            self._close_again(self._now_s)

    def _close_again(self, now_s: float) -> None:
        """Close the round once more if a worker was missing: nothing has changed by the first attempt."""
        if self._again is not None and now_s >= self._again_s and (self._without_keeper or not self._messages.absent):
            self._close(*self._again)

    def _on_computed(self, transition: Transition | ShardsUnavailableError | NumericsError) -> None:
        if isinstance(transition, NumericsError):
            # The same updates give the same error, so there is no other attempt; devices are still answered.
            self.obstacle = f"round {self.state.round} can't be closed: {transition}"
            LOG.error("the round can't be closed", extra={"kv": {"reason": transition, "hint": UNCLOSABLE_HINT}})
            return
        if isinstance(transition, ShardsUnavailableError):
            if not isinstance(transition, KeeperAwaitedError):
                self._again_s = self._now_s + AGAIN_S
                LOG.warning("the round can't be closed yet", extra={"kv": {"reason": transition}})
            elif self._opener is not None and self._opener.answered:  # before this thread has heard that it was asked
                self._again_s = self._now_s
                self._close_again(self._now_s)
            else:
                self._again_s = self._now_s + KEEPER_AGAIN_S
            return
        self._again = None
        self.computing = False
        self._move(*transition)
        self.uploads.review()

    def _move(self, state: EngineState, actions: tuple[object, ...]) -> None:
        self.state = state
        self._carry_out(actions)
        if state.finished and not self.finished:
            self._end()  # stopped before its first round: there is nothing to announce

    def _carry_out(self, actions: tuple[object, ...]) -> None:
        """Carry out the engine's decisions."""
        now_s = self._now_s
        closed: tuple[int, dict[str, Any]] | None = None
        for action in actions:
            match action:
                case RoundClosed(record):
                    seconds = now_s - self._opened_at_s
                    figures = {**dataclasses.asdict(record), "seconds": seconds, "bytes_up": self._bytes_up}
                    figures["closed_at_s"] = int(self.watch.clock())
                    # Not stored yet: if a round opens next, one transaction stores this record and that snapshot.
                    closed = (record.round, figures)
                    self._lines.closed(record, seconds, self._bytes_up)
                case OpenRound():
                    self._open(action, closed)
                    closed = None
                    self._opened_at_s, self._bytes_up = now_s, 0
                    self._lines.opened(now_s)
                    self._begin_deadline()
                case Gather():
                    self._begin_deadline()
                case RunFinished(last):
                    self.finished = True
                    self._finish(last, closed)
                    closed = None
                case _:
                    raise AssertionError(action)
        if closed is not None:
            self._store.record(*closed)
        if self.finished:
            self._end()

    def _begin_deadline(self) -> None:
        self._deadline_s = self._now_s + self.plan.recipe.deadline_s
        self._since_s = int(self.watch.clock())

    def _end(self) -> None:
        """Release everything that answers to devices do not need."""
        self.finished, self._deadline_s = True, None
        held = HeldModels.none(self.state.held.key_version)
        self.state = dataclasses.replace(self.state, strategy=None, held=held)
        self._store.erase()

    def _finish(self, last: OpenRound, closed: tuple[int, dict[str, Any]] | None) -> None:
        """Announce the final round once more, with its checkpoints, and make them durable together with its record.

        If the process stops in between, the round closes again after the restart, since it is not recorded yet.
        """
        self._messages.order(last.plan, last.nonce, last.held, finished=True)
        self._publisher.open_round(self.plan, self._members, last)
        encoded = dump(last.before, last.held)
        self._store.snapshot(last.plan.round, last.available, encoded, self.state.resume_metadata, closed)

    def _open(self, opened: OpenRound, closed: tuple[int, dict[str, Any]] | None) -> None:
        """Announce a round and make its snapshot durable.

        A round that follows a complete one is announced first, so that devices work while the disk does. If the process
        stops in between, the uploads of the closed round are still in the store, and closing it again gives the same bits.
        """
        before = dump(opened.before, opened.held)

        def keep() -> None:
            self._store.snapshot(opened.plan.round, opened.available, before, self.state.resume_metadata, closed)

        version = opened.held.key_version
        newer_keys = self._membership.newer(version) is not None
        follows = not newer_keys and closed is not None and not closed[1]["missing"]
        if not follows:
            # A restart must find this very round, and with newer keys also the broadcast key in use.
            keep()
        if newer_keys:
            self._use_version(version)
        # Before the announcement: no device's part may come before the order that allows it.
        self._messages.order(opened.plan, opened.nonce, opened.held)
        self._publisher.open_round(self.plan, self._members, opened)
        self._announced_s, self._announce_pause_s = self._now_s, ANNOUNCE_AGAIN_S
        if follows:
            keep()

    def close(self) -> None:
        """Close the store; retained messages stay on the broker."""
        self._inbound.close()
        self._store.close()
