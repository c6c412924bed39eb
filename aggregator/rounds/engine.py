"""The rules of a run, free of I/O: when rounds open and close, and which uploads count.

`Engine.handle` is a pure transition ``(state, event) -> (state, actions)`` without clock, socket or disk. A driver carries
the actions out and feeds events back; the daemon and the loopback fleet drive the same engine. state.py lists the phases
of a run. The transition has two steps, `Engine.record` and `Engine.advance`: a driver may do the second one, in which a round
closes, on another thread.

An event that neither opens nor closes a round takes constant time, whatever the size of the fleet: it changes persistent
collections (state.py) and compares counts.

Where to look:

- a second upload of a device in a round, and the limits on uploads: duplicates_and_limits.py
- quorum and deadline, of an open round and of the gathering before one: quorum_and_deadline.py
- updates with too large a norm: screening.py
- devices whose updates are outliers for several rounds: standstill.py
- the models that devices hold: opening.py, held_models.py and relay.py
- the owner's orders to pause and to stop: state.py
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from aggregator.persistent import PersistentList, PersistentMap, PersistentSet
from aggregator.rounds.closing import Opener, close_round
from aggregator.rounds.duplicates_and_limits import Decision, decide
from aggregator.rounds.held_models import Agreement, HeldModels, after_round, agree, offers_of, transcript_of, with_sums
from aggregator.rounds.opening import prepare
from aggregator.rounds.quorum_and_deadline import (
    FLEET_TOO_SMALL,
    certifiers,
    is_too_small,
    may_close,
    may_open,
    members,
)
from aggregator.rounds.relay import numbers_in, settle
from aggregator.rounds.snapshot import ResumeMetadata
from aggregator.rounds.state import (
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
    after_deadline,
    after_silence,
    check_transition,
    newest,
    on_declined,
    on_offline,
    on_online,
    on_revoked,
    opened,
    record_of,
    unit_in,
)
from aggregator.rounds.summed import OpenedSum
from aggregator.rounds.suspects import judged
from aggregator.rounds.undoing import refused_models, undone
from aggregator.strategies.base import ClientUpdate, Event, Outcome, RoundPlan, Strategy, in_order, parts_of
from aggregator.strategies.robust import RobustMean
from shoal import limits
from shoal.protocol.documents import Roster, RunPlan
from shoal.protocol.messages import DeclineReason, Phase, Upload

STOPPED: Final = "stopped"
"""Kind of the event in the record of the final round of a run that the owner has stopped."""
PRODUCTS_PER_UPDATE: Final = 8_000_000
"""Time that a closing round takes for each update besides products of coordinates (70 microseconds), in such products."""
ATTACHED_HEAD_BYTES: Final = 1 << 16
"""Most bytes that an attachment takes besides its vectors: the head before them and the seal."""


class Engine:
    """The rules of one run.

    Attributes:
        run: the owner's plan, as signed.
        strategy: the algorithm.
        seed: 16 random bytes from which the rounds' nonces are derived.
        task_bytes: size of the sealed task, which each checkpoint contains.
    """

    def __init__(
        self,
        run: RunPlan,
        strategy: Strategy,
        seed: bytes,
        task_bytes: int = 0,
        average: RobustMean | None = None,
        opener: Opener | None = None,
    ) -> None:
        """Create the engine of a run.

        Args:
            run: the owner's plan.
            strategy: the algorithm.
            seed: 16 random bytes.
            task_bytes: size of the sealed task.
            average: forms the strategy's means, and tells which devices stood apart in them; None if nobody asks.
            opener: opens the sums of a run with a keeper; None without one.
        """
        self.run = run
        self.strategy = strategy
        self.seed = seed
        self.task_bytes = task_bytes
        self.average = average
        self.opener = opener

    def begin(self, devices: tuple[str, ...], key_version: int = 0, roster: Roster | None = None) -> Transition:
        """Return the state before round 1.

        Args:
            devices: the roster's active devices.
            key_version: key version in use.
            roster: the newest roster; without one the run does not wait for newer keys.
        """
        state = EngineState(
            PersistentSet(devices),
            self.strategy.init(devices),
            self.run,
            HeldModels.begin(self.run, devices, key_version),
            newest=key_version,
            roster=roster,
        )
        return state, (Gather(),)

    def resume(
        self,
        devices: tuple[str, ...],
        before: Any,
        held: HeldModels,
        round_: int,
        available: tuple[str, ...],
        metadata: ResumeMetadata | None = None,
        roster: Roster | None = None,
    ) -> Transition:
        """Return the state with a round open again.

        Args:
            devices: the roster's active devices.
            before: `OpenRound.before`.
            held: `OpenRound.held`.
            round_: number of the round.
            available: `OpenRound.available`.
            metadata: `EngineState.resume_metadata` at that time; None stands for that of a first round.
            roster: the newest roster.
        """
        metadata = metadata or ResumeMetadata(held.key_version)
        fleet = PersistentSet(devices)
        state = EngineState(
            fleet,
            before,
            self.run,
            held,
            PersistentSet(d for d in available if d in fleet),
            newest=held.key_version,
            roster=roster,
            watched=metadata.watched,
            news=metadata.news,
            silent=metadata.silent,
        )
        # The same round, with devices that were revoked meanwhile; the strategy hears of those before the next one.
        state, actions = self._open(state, round_, available, waited=True)
        return dataclasses.replace(state, parted=True), actions

    def over(
        self,
        devices: tuple[str, ...],
        round_: int,
        metadata: ResumeMetadata,
        received: Mapping[str, tuple[Phase, bytes]],
    ) -> EngineState:
        """Return the state of a finished run, for an aggregator that was restarted; no event changes it.

        Args:
            devices: the roster's active devices.
            round_: number of the final round.
            metadata: `EngineState.resume_metadata` when that round opened.
            received: device -> (phase, digest) of its durable upload to that round.
        """
        return EngineState(
            PersistentSet(devices),
            None,
            self.run,
            HeldModels.none(metadata.key_version),
            round=round_,
            received=PersistentMap(received),
            finished=True,
        )

    def nonce(self, round_: int) -> bytes:
        """Return the 16 bytes that an upload to the round must repeat."""
        return hashlib.sha256(b"shoal/v1/round" + self.seed + round_.to_bytes(4, "little")).digest()[:16]

    def validate(
        self, state: EngineState, upload: Upload, digest: bytes, pending: bytes | None = None
    ) -> tuple[Decision, str]:
        """Return whether an authentic upload may be stored, and for a refusal the reason; see `duplicates_and_limits.decide`.

        Args:
            state: of the run; it stays as it is.
            upload: the upload's header.
            digest: the upload's digest.
            pending: digest of the device's upload that is valid and not durable yet, None without one.
        """
        most = self.most_attached(state, upload.device)
        return decide(state, upload, digest, pending, nonce=self.nonce(state.round), most_attached=most)

    def most_attached(self, state: EngineState, device: str) -> int:
        """Return how many bytes a device may attach to its upload in ``state``."""
        assignment = None if state.plan is None else state.plan.assignments.get(device)
        if assignment is None or not assignment.seal:
            return 0
        each = 2 * limits.SEALED_HEAD_BYTES + self.task_bytes + 4 * self.run.length
        return ATTACHED_HEAD_BYTES + each * len(assignment.seal)

    def handle(self, state: EngineState, event: EngineEvent) -> Transition:
        """Return the state after ``event``, and the actions for the driver.

        Raises:
            PhaseError: the event caused a change of phase that state.py does not list.
        """
        return self.advance(state, self.record(state, (event,)))

    def record(self, state: EngineState, events: Iterable[EngineEvent]) -> EngineState:
        """Return the state with the facts of ``events`` recorded; `advance` must follow, before any other event.

        Uploads that became durable together are recorded together, so that none of them is left to a later round.
        """
        if not state.finished:
            for event in events:
                state = self._apply(state, event)
        return state

    def closing_work(self, recorded: EngineState) -> int:
        """Return the work of `advance` at most, in products of two coordinates; 0 if no round closes.

        Args:
            recorded: the result of `record`.
        """
        if recorded.finished or recorded.plan is None or not may_close(recorded):
            return 0
        updates = len(recorded.contributions)
        return updates * ((updates + 1) * self.run.length + PRODUCTS_PER_UPDATE)

    def advance(self, before: EngineState, recorded: EngineState) -> Transition:
        """Return the state after a round has closed or opened, where the recorded facts say so, and the actions for the driver.

        It reads nothing but its arguments and may run on another thread, if the driver handles no event meanwhile.

        Args:
            before: the state before `record`.
            recorded: its result.

        Raises:
            PhaseError: as for `handle`.
        """
        if before.finished:
            return before, ()
        after, actions = self._advance(recorded)
        if _gathers_again(before, after) and not actions:
            actions = (Gather(),)
        check_transition(before, after)
        return after, actions

    def _apply(self, state: EngineState, event: EngineEvent) -> EngineState:
        """Return the state with the facts of ``event`` recorded."""
        match event:
            case CameOnline(device, origins):
                state = on_online(state, device)
                held = state.held.with_origins(device, origins)
                state = state if held is state.held else dataclasses.replace(state, held=held)
            case WentOffline(device):
                state = on_offline(state, device)
            case Left(device):
                state = on_revoked(state, device)
            case Declined(device, nonce, reason, other, model):
                if state.plan is not None and nonce == self.nonce(state.round):
                    state = on_declined(state, device, reason)
                    if reason is DeclineReason.SUM:
                        state = dataclasses.replace(state, disputed=state.disputed.adding(device, model))
                    others = state.others.adding(device, other) if other else state.others
                    state = dataclasses.replace(state, others=others)
            case ClientUpdate():
                state = self._receive(state, event)
            case DeadlinePassed(round_):
                # The driver holds events back during a commit, in which the round may have closed.
                if round_ == state.round:
                    state = after_deadline(state)
            case Rostered(roster):
                state = dataclasses.replace(state, roster=roster)
            case KeysHeld(version):
                state = dataclasses.replace(state, newest=max(state.newest, version))
            case Ordered(order):
                state = self._ordered(state, newest(state.order, order))
        return state

    def _ordered(self, state: EngineState, order: Order) -> EngineState:
        """Return the state under an order of the owner."""
        if order is state.order:
            return state
        over = state.order is Order.PAUSE and state.plan is None
        state = dataclasses.replace(state, order=order, deadline_passed=state.deadline_passed and not over)
        if not order.stops or state.plan is not None:
            return state
        # Before the first round has closed, devices have no model of this run that they could end with.
        return state if state.held.closed else dataclasses.replace(state, finished=True)

    def _receive(self, state: EngineState, contribution: ClientUpdate) -> EngineState:
        assignment = None if state.plan is None else state.plan.assignments.get(contribution.device)
        if assignment is None or assignment.phase != contribution.phase or contribution.device in state.received:
            return state
        return dataclasses.replace(
            state,
            received=state.received.adding(contribution.device, (contribution.phase, contribution.digest)),
            contributions=state.contributions.appending(contribution),
            refused=state.refused.removing(contribution.device),
            unfit=state.unfit.removing(contribution.device),
            lacking=state.lacking.removing(contribution.device),
            unavailable=state.unavailable.removing(contribution.device),
            removed=state.removed.removing(contribution.device),
        )

    def _advance(self, state: EngineState) -> Transition:
        if state.finished:
            return state, ()
        if state.plan is None:
            return self._maybe_open(state)
        return self._close(state) if may_close(state) else (state, ())

    def _maybe_open(self, state: EngineState) -> Transition:
        """Open a round with the online devices as soon as they are enough."""
        if not may_open(state):
            return state, ()
        if not state.stopped:
            return self._open(state, state.round + 1, state.present, waited=state.deadline_passed)
        # The final round has the number that devices expect of one: they accept no other.
        last, round_ = self._with_final_models(state), self.run.recipe.rounds + 1
        after, actions = self._open(last, round_, state.present, waited=state.deadline_passed)
        return (after, actions) if actions else (state, ())

    def _with_final_models(self, state: EngineState) -> EngineState:
        """Return the state of a stopped run with the models that the final round alone offers; see `_settle`."""
        if state.held.closed >= self.run.recipe.rounds:
            return state
        models = self.strategy.models_of(state.strategy)
        (strategy, extra), states, steps = settle(
            (state.strategy, models), models, state.held.states, self.run.recipe.rounds
        )
        if not steps:
            return state
        held = with_sums(state.held, states, steps, numbers_in((strategy, extra)), self.run)
        return dataclasses.replace(state, strategy=strategy, held=held)

    def _open(self, state: EngineState, round_: int, available: tuple[str, ...], *, waited: bool) -> Transition:
        """Open a round under the newest key version, for the devices that can get its models."""
        if state.parted:
            strategy = self.strategy.retain(state.strategy, frozenset(state.devices))
            state = dataclasses.replace(state, strategy=strategy, parted=False)
        held = dataclasses.replace(state.held.only(state.devices), key_version=state.newest)
        ready = prepare(
            state.strategy,
            held,
            available,
            self.run,
            lambda s, there: self._planned(s, round_, there),
            waited=waited,
            signers=certifiers(state),
        )
        if ready is None or not ready.plan.assignments:
            return state, ()
        state = dataclasses.replace(
            state,
            strategy=ready.after,
            held=ready.held,
            checkpoints_only=ready.checkpoints_only,
            head=transcript_of(ready.held, self.run, round_, offers_of(ready.plan, ready.held.states)),
            # After a restart the snapshot has them already.
            news=(*state.news, *(event for event in ready.events if event not in state.news)),
        )
        action = OpenRound(
            plan=ready.plan,
            nonce=self.nonce(round_),
            before=ready.before,
            available=available,
            held=ready.held,
        )
        state = opened(state, ready.plan)
        return state, (dataclasses.replace(action, unit=unit_in(state)),)

    def _planned(self, before: Any, round_: int, available: tuple[str, ...]) -> tuple[Any, RoundPlan]:
        if round_ > self.run.recipe.rounds:
            return before, self.strategy.final(before, round_, available)
        return self.strategy.plan(before, round_, available)

    def _close(self, state: EngineState) -> Transition:
        plan = state.plan
        assert plan is not None
        strategy, held = state.strategy, state.held
        refused: Mapping[str, float] = {}
        limit = 0.0
        agreement = agree(held, offers_of(plan, held.states), in_order(state.contributions), plan.assignments)
        accepted, unopened = agreement.accepted, tuple[Event, ...]()
        refused_means = frozenset[int]()
        opened: tuple[ClientUpdate, ...] | None = None
        sums: tuple[OpenedSum, ...] = ()
        if self.opener is not None:
            nonce = self.nonce(plan.round)
            left_out = held.suspects.left_out(nonce)
            cells = self.opener.open(plan.round, nonce, accepted, parts_of(self.strategy), left_out, unit_in(state))
            accepted, opened, unopened, sums = cells.updates, cells.updates, cells.events, cells.sums
            refused_means = refused_models(dict(state.disputed.items()), agreement.accepted)
            suspects, told = judged(
                held.suspects,
                plan.round,
                spoilt=cells.spoilt,
                opened=cells.opened,
                refused=refused_means,
                used={c.model for c in agreement.accepted if c.vector is not None},
            )
            state = dataclasses.replace(state, held=dataclasses.replace(held, suspects=suspects))
            unopened = (*unopened, *told)
        if plan.final:
            outcome = Outcome({c.device: c.model for c in agreement.accepted}, self._ended_by(state))
        elif state.checkpoints_only:
            outcome = Outcome({})
        else:
            strategy, outcome, watched, screened = close_round(
                self.strategy,
                strategy,
                plan,
                accepted,
                state.watched,
                run=self.run,
                average=self.average,
                fleet=state.devices,
                there=state.online,
                left_out=agreement.out_of_step,
                declined=state.declined,
            )
            state = dataclasses.replace(state, watched=watched)
            refused, limit = screened.refused, screened.limit
        if is_too_small(state):
            found = {"devices": len(members(state)), "min_contributors": self.run.recipe.min_contributors}
            outcome = dataclasses.replace(outcome, events=(*outcome.events, Event(plan.round, FLEET_TOO_SMALL, found)))
        silent, quiet = after_silence(state)
        outcome = dataclasses.replace(outcome, events=(*outcome.events, *unopened, *quiet))
        strategy, held = self._settle(state, plan, strategy, agreement, limit, sums)
        held = undone(held, refused_means)
        closed = RoundClosed(record_of(state, plan, outcome, refused, agreement.out_of_step, opened))
        state = dataclasses.replace(
            state,
            strategy=strategy,
            silent=silent,
            plan=None,
            contributions=PersistentList(),
            finished=plan.final,
            deadline_passed=False,
            news=(),
            held=held,
            checkpoints_only=False,
        )
        if plan.final:
            nonce = self.nonce(plan.round)
            last = OpenRound(plan=plan, nonce=nonce, before=strategy, available=(), held=held)
            return state, (closed, RunFinished(last))
        state, actions = self._maybe_open(state)
        return state, (closed, *(actions or (Gather(),)))

    @staticmethod
    def _ended_by(state: EngineState) -> tuple[Event, ...]:
        """Return an event for the final round of a run that the owner has stopped."""
        after = state.held.closed
        return (
            (Event(state.round, STOPPED, {"by": "owner", "after": after}),) if after < state.run.recipe.rounds else ()
        )

    def _settle(
        self,
        state: EngineState,
        plan: RoundPlan,
        strategy: Any,
        agreement: Agreement,
        limit: float,
        sums: tuple[OpenedSum, ...],
    ) -> tuple[Any, HeldModels]:
        """Return the strategy's state without vectors, and the models after the round."""
        held, settled = state.held, None
        models = self.strategy.models_of(strategy)
        if not plan.final:
            # The final round may offer models that follow from others, which become states while their means are there.
            extra = models if plan.round == self.run.recipe.rounds else {}
            (strategy, extra), states, steps = settle((strategy, extra), models, held.states, plan.round)
            settled = states, steps, numbers_in((strategy, extra))
        moved = after_round(
            held,
            plan.round,
            run=self.run,
            offers=offers_of(plan, held.states),
            agreement=agreement,
            given=in_order(state.contributions),
            declined=dict(state.declined.items()),
            settled=settled,
            models=models,
            limit=limit,
            signers=certifiers(state),
            sums=sums,
        )
        return strategy, moved


def _gathers_again(before: EngineState, after: EngineState) -> bool:
    """Return whether a pause is over and no round is open: the time for devices to come begins again."""
    over = before.order is Order.PAUSE and after.order is not Order.PAUSE
    return over and after.plan is None and not after.finished
