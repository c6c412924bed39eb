"""State transitions of a rollover: two steps between rounds, then the next mask epoch or another attempt (rollover.py).

They are pure functions of the state, like the rest of the engine.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from aggregator.persistent import PersistentList
from aggregator.rounds import rollover
from aggregator.rounds.events import Gather, OpenRound, Renewed, RolloverFailed
from aggregator.rounds.rollover import Rollover
from aggregator.rounds.state import EngineState, Transition, noted, opened
from aggregator.strategies.base import ClientUpdate, RoundPlan, Strategy, UploadKey, in_order
from aggregator.strategies.renewal import Renewal
from shoal.errors import ShoalError
from shoal.membership.certificates import certify, majority
from shoal.protocol.codec import encode
from shoal.protocol.documents import RunPlan
from shoal.protocol.epochs import UNSIGNED


class Turnover:
    """How a run gets from one mask epoch to the next."""

    def __init__(
        self,
        strategy: Callable[[RunPlan], Strategy],
        nonce: Callable[[int, int], bytes],
        reopen: Callable[[EngineState], Transition],
    ) -> None:
        """Take the engine's strategy by plan, its nonce by round and step, and what opens whatever comes next."""
        self._strategy = strategy
        self._nonce = nonce
        self._reopen = reopen

    def fold(self, state: EngineState, available: tuple[str, ...] | None) -> Transition:
        """Open the first step of a rollover, once more than half of the roster is there to sign it.

        Args:
            state: with no round open.
            available: the devices that may take part; None stands for those that are online.
        """
        if state.roster is None or state.roster.keys_since != state.newest:
            return state, ()  # of the owner's newer keys and the roster that goes with them one is still on its way
        r = state.rollover
        if r is None or r.generation != state.newest:
            r = Rollover(state.newest, 0 if r is None else r.tries)
        # This comes with every presence of a run that waits for its rollover, so the counts are looked at first.
        least = majority(state.roster.active_count)
        if len(state.online if available is None else available) < least:
            return state, ()
        if r.tries >= rollover.HASTY_TRIES and not (state.deadline_passed or r.folder):
            return state, ()
        available = state.present if available is None else available
        able = self._able(state, available)
        if len(able) < least:
            return state, ()
        if not r.folder:
            # At first whoever answered in the round before: a newcomer may have no part in this mask epoch.
            likely = [d for d in able if d in state.received and not r.tries] or able
            r = dataclasses.replace(r, folder=likely[(state.run.epoch + r.tries) % len(likely)])
        r = dataclasses.replace(r, proposal=None)
        inherited = self._strategy(state.run).inherited(state.strategy)
        keep = r.generation == state.generation
        plan = rollover.fold_plan(inherited, state.run, state.round, state.step + 1, r.folder, keep=keep)
        return self._open_step(dataclasses.replace(state, rollover=r), plan, available)

    def _able(self, state: EngineState, available: tuple[str, ...]) -> tuple[str, ...]:
        active = set() if state.roster is None else set(state.roster.active())
        return tuple(d for d in available if d in active)

    def sign(self, state: EngineState, available: tuple[str, ...]) -> Transition:
        """Open the second step, in which everybody compares and signs."""
        r = state.rollover
        assert r is not None
        assert r.proposal is not None
        inherited = self._strategy(state.run).inherited(state.strategy)
        try:
            folded = rollover.read_proposal(r.proposal, inherited, state.run, r.generation, state.generation)
        except ShoalError as error:
            return self._fail(state, f"{r.folder}: {error}")
        keep = r.generation == state.generation
        devices = self._able(state, available)
        plan = rollover.sign_plan(inherited, state.round, state.step + 1, devices, keep=keep)
        return self._open_step(state, plan, available, encode(folded.checkpoint) + folded.sealed)

    def _open_step(
        self, state: EngineState, plan: RoundPlan, available: tuple[str, ...], proposal: bytes = b""
    ) -> Transition:
        assert state.rollover is not None
        generation, nonce = state.rollover.generation, self._nonce(plan.round, plan.step)
        state = opened(state, plan)
        return state, (
            OpenRound(
                plan=plan,
                nonce=nonce,
                before=state.strategy,
                available=available,
                generation=generation,
                proposal=proposal,
            ),
        )

    def advance(self, state: EngineState) -> Transition:
        """Go on from a step that is open, where enough has come or the time is over."""
        r = state.rollover
        assert r is not None
        if state.newest > r.generation:
            return self._fail(state, "the owner has drawn newer secrets")
        if r.proposal is None and state.contributions:
            state = dataclasses.replace(state, rollover=dataclasses.replace(r, proposal=state.contributions[0]))
            return self.sign(state, state.present)
        if state.awaited and not state.deadline_passed:
            return state, ()
        return self._fail(state, f"{r.folder} did not fold") if r.proposal is None else self._conclude(state, r)

    def _conclude(self, state: EngineState, r: Rollover) -> Transition:
        """Begin the next mask epoch, if enough devices have signed."""
        plan, roster = state.plan, state.roster
        assert plan is not None
        assert roster is not None
        assert r.proposal is not None
        inherited = self._strategy(state.run).inherited(state.strategy)
        folded = rollover.read_proposal(r.proposal, inherited, state.run, r.generation, state.generation)
        c = folded.checkpoint
        signatures: dict[str, bytes] = {}
        own: dict[UploadKey, ClientUpdate] = {}
        for upload in in_order(state.contributions):
            assignment = plan.assignments[upload.device]
            try:
                signature, renewed = rollover.read_endorsement(upload, assignment, inherited, state.run, c.key_id)
            except ShoalError as error:
                state = noted(state, "endorsement-refused", {"device": upload.device, "reason": str(error)})
                continue
            if signature != UNSIGNED:
                signatures[upload.device] = signature
                own |= renewed
        certificate = certify(c, roster, state.roster_bytes, signatures)
        if certificate is None:
            total = len(roster.active())
            return self._fail(state, f"{len(signatures)} of {total} devices signed the fold of {r.folder}")
        run = state.run.in_epoch(c.next_epoch, c.key_id)
        origins = {model: i for i, model in enumerate(sorted(inherited.models))}
        renewal = Renewal(state.round, origins, folded.carried, own)
        strategy = self._strategy(run)
        state = dataclasses.replace(
            state,
            run=run,
            strategy=strategy.retain(strategy.renewed(state.strategy, renewal), frozenset(roster.active())),
            since=state.round,
            generation=c.generation,
            plan=None,
            contributions=PersistentList(),
            rollover=None,
            deadline_passed=False,
        )
        detail = {
            "epoch": c.next_epoch,
            "folded": len(origins),
            "signatures": len(certificate.signatures),
            "devices": len(roster.active()),
            "carried": len(folded.carried),
            "renewed": len(own),
        }
        state = noted(state, "mask-epoch", detail)
        done = Renewed(
            round=state.round,
            certificate=certificate,
            sealed=folded.sealed,
            state=state.strategy,
            metadata=state.resume_metadata,
            own=own,
        )
        state, actions = self._reopen(state)
        return state, (done, *(actions or (Gather(),)))

    def _fail(self, state: EngineState, reason: str) -> Transition:
        """The old mask epoch stays; another device folds next."""
        r = state.rollover
        assert r is not None
        state = dataclasses.replace(
            state,
            plan=None,
            contributions=PersistentList(),
            deadline_passed=False,
            rollover=Rollover(r.generation, r.tries + 1),
        )
        failed = RolloverFailed(state.round, reason)
        state, actions = self._reopen(noted(state, "rollover-failed", {"reason": reason}))
        return state, (failed, *(actions or (Gather(),)))
