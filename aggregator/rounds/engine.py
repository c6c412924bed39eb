"""The rules of a run, free of I/O: when rounds open and close, and which uploads count.

`Engine.handle` is a pure transition ``(state, event) -> (state, actions)`` without clock, socket or disk. A driver carries
the actions out and feeds events back; the daemon and the loopback fleet drive the same engine. phases.py lists the phases
of a run.

An event that neither opens nor closes a round takes constant time, whatever the size of the fleet: it changes persistent
collections (state.py) and compares counts.

Where to look:

- a second upload of a device in a round, and the limits on uploads: duplicates_and_limits.py
- quorum and deadline, of an open round and of the gathering before one: quorum_and_deadline.py
- updates with too large a norm: screening.py
- the models under round keys: opening.py and held_models.py
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable, Mapping
from typing import Any, Final

from aggregator.persistent import PersistentList, PersistentMap, PersistentSet
from aggregator.rounds.duplicates_and_limits import Decision, decide
from aggregator.rounds.events import (
    CameOnline,
    DeadlinePassed,
    Declined,
    Event,
    Gather,
    KeysHeld,
    Left,
    OpenRound,
    Rostered,
    RoundClosed,
    RunFinished,
    Stored,
    WentOffline,
)
from aggregator.rounds.held_models import Agreement, HeldModels, after_round, agree, offers_of
from aggregator.rounds.opening import prepare
from aggregator.rounds.phases import check_transition
from aggregator.rounds.quorum_and_deadline import may_close, may_open
from aggregator.rounds.relay import numbers_in, settle
from aggregator.rounds.resume import ResumeMetadata
from aggregator.rounds.rollover import Rollover
from aggregator.rounds.screening import screen
from aggregator.rounds.state import (
    EngineState,
    Transition,
    on_declined,
    on_offline,
    on_online,
    on_revoked,
    opened,
    record_of,
)
from aggregator.rounds.turnover import Turnover
from aggregator.strategies.base import ClientUpdate, Outcome, RoundPlan, Strategy, in_order
from aggregator.strategies.registry import make_strategy
from shoal import limits
from shoal.protocol.documents import Roster, RunPlan
from shoal.protocol.messages import SHARED_MODEL, Phase, Upload

ATTACHED_HEAD_BYTES: Final = 1 << 16
"""Most bytes that an attachment takes besides its vectors: the head before them and the seal."""


class Engine:
    """The rules of one run.

    Attributes:
        run: the owner's plan, as signed.
        strategy: the algorithm in the run's first mask epoch.
        seed: 16 random bytes from which the rounds' nonces are derived.
        task_bytes: size of the sealed task, which the upload of a fold contains.
    """

    def __init__(
        self,
        run: RunPlan,
        strategy: Strategy,
        seed: bytes,
        strategy_for: Callable[[RunPlan], Strategy] = make_strategy,
        task_bytes: int = 0,
    ) -> None:
        """Create the engine of a run.

        Args:
            run: the owner's plan.
            strategy: the algorithm.
            seed: 16 random bytes.
            strategy_for: makes the strategy of a later mask epoch.
            task_bytes: size of the sealed task.
        """
        self.run = run
        self.seed = seed
        self.task_bytes = task_bytes
        self._strategy_for = strategy_for
        self.strategy = strategy
        self._strategies = {run.key_id: strategy}
        self._turnover = Turnover(self.strategy_in, self.nonce, self._maybe_open)

    def strategy_in(self, run: RunPlan) -> Strategy:
        """Return the algorithm in the mask epoch of the plan ``run``."""
        if run.key_id not in self._strategies:
            self._strategies[run.key_id] = self._strategy_for(run)
        return self._strategies[run.key_id]

    def begin(
        self, devices: tuple[str, ...], generation: int = 0, roster: Roster | None = None, roster_bytes: bytes = b""
    ) -> Transition:
        """Return the state before round 1.

        Args:
            devices: the roster's active devices.
            generation: key version in use.
            roster: the newest roster; without one no mask epoch can end.
            roster_bytes: the roster as the owner signed it.
        """
        state = EngineState(
            PersistentSet(devices),
            self.strategy.init(devices),
            self.run,
            generation=generation,
            newest=generation,
            roster=roster,
            roster_bytes=roster_bytes,
            held=HeldModels.begin(self.run, devices, generation) if self.run.keys == "round" else None,
        )
        return state, (Gather(),)

    def run_in(self, metadata: ResumeMetadata) -> RunPlan:
        """Return the plan in the mask epoch of an `EngineState.resume_metadata`."""
        if metadata.epoch == self.run.epoch:
            return self.run
        return self.run.in_epoch(metadata.epoch, metadata.key_id)

    def resume(
        self,
        devices: tuple[str, ...],
        before: Any,
        round_: int,
        available: tuple[str, ...],
        metadata: ResumeMetadata | None = None,
        proposal: ClientUpdate | None = None,
        roster: Roster | None = None,
        roster_bytes: bytes = b"",
        held: HeldModels | None = None,
    ) -> Transition:
        """Return the state with a round, or a step of a rollover, open again.

        Args:
            devices: the roster's active devices.
            before: `OpenRound.before`.
            round_: number of the round.
            available: `OpenRound.available`.
            metadata: `EngineState.resume_metadata` at that time; None means that the run has had no rollover.
            proposal: the stored upload of the device that folded, if the rollover had got that far.
            roster: the newest roster.
            roster_bytes: the roster as the owner signed it.
            held: `OpenRound.kept`.
        """
        fleet = PersistentSet(devices)
        online = PersistentSet(d for d in available if d in fleet)
        state = EngineState(fleet, before, self.run, online, roster=roster, roster_bytes=roster_bytes, held=held)
        if metadata is None:
            return self._open(state, round_, available, waited=True)
        state = dataclasses.replace(
            state,
            run=self.run_in(metadata),
            since=metadata.since,
            generation=metadata.generation,
            newest=metadata.newest_generation,
            levels=metadata.levels,
            news=metadata.news,
        )
        r = metadata.rollover
        if not metadata.open:
            failed = None if r is None else Rollover(r.generation, r.tries)
            state = dataclasses.replace(
                state, round=round_, step=metadata.step, online=PersistentSet(), rollover=failed
            )
            return state, (Gather(),)
        if r is None:
            return self._open(state, round_, available, waited=True)
        signing = r.signing and proposal is not None
        under_way = Rollover(r.generation, r.tries, r.folder, proposal if signing else None)
        state = dataclasses.replace(state, round=round_, step=metadata.step - 1, rollover=under_way)
        if signing:
            return self._turnover.sign(state, available)
        return self._turnover.fold(state, available)

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
        run = self.run_in(metadata)
        fleet = PersistentSet(devices)
        received = PersistentMap(received)
        return EngineState(
            fleet, None, run, round=round_, received=received, finished=True, generation=metadata.generation
        )

    def nonce(self, round_: int, step: int = 0) -> bytes:
        """Return the 16 bytes that an upload to the round, or to a step after it, must repeat."""
        place = round_.to_bytes(4, "little") + (step.to_bytes(4, "little") if step else b"")
        return hashlib.sha256(b"shoal/v1/round" + self.seed + place).digest()[:16]

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
        step = 0 if state.plan is None else state.plan.step
        most = self.most_attached(state, upload.device)
        return decide(state, upload, digest, pending, nonce=self.nonce(state.round, step), most_attached=most)

    def most_attached(self, state: EngineState, device: str) -> int:
        """Return how many bytes a device may attach to its upload in ``state``."""
        return (
            0 if state.plan is None or device not in state.plan.assignments else self._most_attached(state.plan, device)
        )

    def _most_attached(self, plan: RoundPlan, device: str) -> int:
        assignment = plan.assignments[device]
        if assignment.phase == Phase.ENDORSE:
            return ATTACHED_HEAD_BYTES + 4 * self.run.length * len(assignment.renew)
        if assignment.phase == Phase.CHECKPOINT:
            vectors = len(plan.models) + len(plan.carried)
            return ATTACHED_HEAD_BYTES + self.task_bytes + 4 * self.run.length * vectors
        if assignment.seal:
            each = 2 * limits.SEALED_HEAD_BYTES + self.task_bytes + 4 * self.run.length
            return ATTACHED_HEAD_BYTES + each * len(assignment.seal)
        return 0

    def handle(self, state: EngineState, event: Event) -> Transition:
        """Return the state after ``event``, and the actions for the driver.

        Raises:
            PhaseError: the event caused a change of phase that phases.py does not list.
        """
        if state.finished:
            return state, ()
        after, actions = self._advance(self._apply(state, event))
        check_transition(state, after)
        return after, actions

    def _apply(self, state: EngineState, event: Event) -> EngineState:
        """Return the state with the facts of ``event`` recorded."""
        match event:
            case CameOnline(device):
                state = on_online(state, device)
            case WentOffline(device):
                state = on_offline(state, device)
            case Left(device):
                state = on_revoked(state, device)
            case Declined(device, nonce, reason):
                if state.plan is not None and nonce == self.nonce(state.round, state.plan.step):
                    state = on_declined(state, device, reason)
            case Stored(contribution, digest):
                state = self._receive(state, contribution, digest)
            case DeadlinePassed(round_, step):
                # The driver holds events back during a commit, in which the round may have closed.
                if (round_, step) == (state.round, state.step):
                    state = dataclasses.replace(state, deadline_passed=True)
            case Rostered(roster, data):
                state = dataclasses.replace(state, roster=roster, roster_bytes=data)
            case KeysHeld(generation):
                state = dataclasses.replace(state, newest=max(state.newest, generation))
        return state

    def _receive(self, state: EngineState, contribution: ClientUpdate, digest: bytes) -> EngineState:
        assignment = None if state.plan is None else state.plan.assignments.get(contribution.device)
        if assignment is None or assignment.phase != contribution.phase or contribution.device in state.received:
            return state
        return dataclasses.replace(
            state,
            received=state.received.adding(contribution.device, (contribution.phase, digest)),
            contributions=state.contributions.appending(contribution),
            refused=state.refused.removing(contribution.device),
            lacking=state.lacking.removing(contribution.device),
            unavailable=state.unavailable.removing(contribution.device),
            removed=state.removed.removing(contribution.device),
        )

    def _advance(self, state: EngineState) -> Transition:
        if state.plan is None:
            return self._maybe_open(state)
        if state.plan.step:
            return self._turnover.advance(state)
        return self._close(state) if may_close(state) else (state, ())

    def _maybe_open(self, state: EngineState) -> Transition:
        """Open a round with the online devices as soon as they are enough, or end the mask epoch if that is due."""
        if state.held is None and self._is_due(state):
            return self._turnover.fold(state, None)
        if not may_open(state):
            return state, ()
        return self._open(state, state.round + 1, state.present, waited=state.deadline_passed)

    def _open(self, state: EngineState, round_: int, available: tuple[str, ...], *, waited: bool) -> Transition:
        if state.held is not None:
            return self._open_held(state, state.held, round_, available, waited=waited)
        before = state.strategy
        after, plan = self._planned(state.run, before, round_, available)
        if not plan.assignments:
            return state, ()
        state = opened(dataclasses.replace(state, strategy=after), plan)
        return state, (OpenRound(plan=plan, nonce=self.nonce(round_), before=before, available=available),)

    def _planned(self, run: RunPlan, before: Any, round_: int, available: tuple[str, ...]) -> tuple[Any, RoundPlan]:
        strategy = self.strategy_in(run)
        if round_ > self.run.rounds:
            return before, strategy.final(before, round_, available)
        return strategy.plan(before, round_, available)

    def _open_held(
        self, state: EngineState, held: HeldModels, round_: int, available: tuple[str, ...], *, waited: bool
    ) -> Transition:
        """Open a round under round keys: under the newest key version, for the devices that can get its models."""
        held = dataclasses.replace(held.only(state.devices), key_version=state.newest)
        ready = prepare(
            state.strategy,
            held,
            available,
            state.run,
            lambda s, there: self._planned(state.run, s, round_, there),
            waited=waited,
        )
        if ready is None or not ready.plan.assignments:
            return state, ()
        state = dataclasses.replace(
            state,
            strategy=ready.after,
            generation=held.key_version,
            held=ready.held,
            checkpoints_only=ready.checkpoints_only,
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
        return opened(state, ready.plan), (action,)

    def _is_due(self, state: EngineState) -> bool:
        """Return whether the mask epoch ends: newer secrets exist, or it has had its rounds and the run goes on.

        Until the newer secrets are available, no round opens that a revoked device could read.
        """
        drawn = 0 if state.roster is None else state.roster.keys_since
        if max(state.newest, drawn) > state.generation or state.rollover is not None:
            return True
        return state.round < self.run.rounds and state.round - state.since >= self.run.epoch_rounds

    def _close(self, state: EngineState) -> Transition:
        plan = state.plan
        assert plan is not None
        strategy, levels, held = state.strategy, state.levels, state.held
        refused: Mapping[str, float] = {}
        given = tuple(state.contributions)
        agreement = None
        if held is not None:
            agreement = agree(held, offers_of(plan, held.states), in_order(given), plan.assignments)
            given = agreement.accepted
        if plan.final:
            outcome = Outcome({c.device: c.model for c in given})
        elif state.checkpoints_only:
            outcome = Outcome({})
        else:
            rules = self.strategy_in(state.run)
            # Only the whole round shows which updates have too large a norm, so the strategy sees none of them earlier.
            screened = screen(given, levels, plan.placing)
            levels, refused = screened.levels, screened.refused
            for contribution in screened.accepted:
                strategy = rules.absorb(strategy, contribution)
            strategy, outcome = rules.close(strategy, plan)
        out_of_step: Mapping[str, int] = {}
        if held is not None and agreement is not None:
            out_of_step = agreement.out_of_step
            strategy, held = self._settle(state, held, plan, strategy, agreement)
        closed = RoundClosed(record_of(state, plan, outcome, refused, out_of_step))
        state = dataclasses.replace(
            state,
            strategy=strategy,
            levels=levels,
            plan=None,
            contributions=PersistentList(),
            finished=plan.final,
            deadline_passed=False,
            news=(),
            held=held,
            checkpoints_only=False,
        )
        if plan.final:
            last = None
            if held is not None:
                nonce = self.nonce(plan.round)
                last = OpenRound(plan=plan, nonce=nonce, before=strategy, available=(), held=held)
            return state, (closed, RunFinished(last))
        state, actions = self._maybe_open(state)
        return state, (closed, *(actions or (Gather(),)))

    def _settle(
        self, state: EngineState, held: HeldModels, plan: RoundPlan, strategy: Any, agreement: Agreement
    ) -> tuple[Any, HeldModels]:
        """Return the strategy's state without vectors, and the models after the round."""
        settled = None
        if not plan.final:
            inherited = self.strategy_in(state.run).inherited(strategy)
            models = dict(inherited.models)
            if inherited.shared is not None:
                models[SHARED_MODEL] = inherited.shared
            # The final round may offer models that follow from others, which become states while their means are there.
            extra = models if plan.round == state.run.rounds else {}
            (strategy, extra), states, steps = settle((strategy, extra), models, held.states, plan.round)
            settled = states, steps, numbers_in((strategy, extra))
        moved = after_round(
            held,
            plan.round,
            run=state.run,
            offers=offers_of(plan, held.states),
            agreement=agreement,
            given=in_order(state.contributions),
            declined=dict(state.declined.items()),
            settled=settled,
        )
        return strategy, moved
