"""The aggregator's rules, free of I/O: rounds open, uploads are judged, rounds close, a run ends.

`Engine.handle` is a pure transition ``(state, event) -> (state, actions)``: no clock, socket or disk. The driver
carries actions out and feeds events back; the MQTT daemon and the loopback fleet drive the same object.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final

from aggregator.strategies.base import Contribution, Outcome, RoundPlan, Strategy
from wire.documents import RunPlan
from wire.limits import MAX_MARGIN
from wire.messages import Phase, Upload

MAX_FIGURE: Final = 3.4e38
"""Largest loss or norm that a device may report: what float32 holds, so that squares and sums of them stay finite."""


class Verdict(Enum):
    """What to do with an upload that is authentic."""

    STORE = "store"
    DUPLICATE = "duplicate"
    REFUSE = "refuse"


@dataclass(frozen=True, slots=True)
class CameOnline:
    """A device's presence says it is there."""

    device: str


@dataclass(frozen=True, slots=True)
class WentOffline:
    """A device's presence, or its will, says it is gone."""

    device: str


@dataclass(frozen=True, slots=True)
class Left:
    """The owner revoked a device: nobody waits for it any more."""

    device: str


@dataclass(frozen=True, slots=True)
class Stored:
    """An upload that `Engine.judge` let pass is durable."""

    contribution: Contribution
    digest: bytes


@dataclass(frozen=True, slots=True)
class DeadlinePassed:
    """The time that the plan gives a round, or the gathering after it, is over."""

    round: int


Event = CameOnline | WentOffline | Left | Stored | DeadlinePassed


@dataclass(frozen=True, slots=True)
class Gather:
    """Wait for devices; feed `DeadlinePassed` with the state's round after the plan's deadline."""


@dataclass(frozen=True, slots=True)
class OpenRound:
    """Make ``before`` durable, then announce ``plan``.

    Attributes:
        before: the strategy's state from which, with ``available``, the same plan follows again.
    """

    plan: RoundPlan
    nonce: bytes
    before: Any
    available: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class RoundClosed:
    """A round is over: what it brought."""

    record: RoundRecord


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The final round is closed: there is nothing left to do."""


Action = Gather | OpenRound | RoundClosed | RunFinished


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """A closed round in figures.

    Attributes:
        ordered, contributed: devices that were asked and that answered; missing: those that did not.
        loss: mean of the devices' losses on the scored share, weighted by samples.
        correct, tested: over the devices' test shares; 0 of 0 where nobody was asked.
        norms: each contributor's update norm; clusters: every device's cluster after the round.
        device_accuracy: (correct, tested) of each contributor that was asked for it.
    """

    round: int
    final: bool
    ordered: int
    contributed: int
    missing: tuple[str, ...]
    loss: float
    correct: int
    tested: int
    norms: Mapping[str, float]
    clusters: Mapping[str, int]
    events: tuple[Mapping[str, Any], ...]
    device_accuracy: Mapping[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class EngineState:
    """Where a run stands.

    Attributes:
        round: the open round, or 0 before the first.
        plan: the open round's, None while gathering.
        received: device -> (phase, digest) of its durable upload of the open round.
        gone: ordered devices that went offline and have not uploaded.
        overtime: the open round's deadline has passed.
    """

    devices: tuple[str, ...]
    strategy: Any
    online: frozenset[str] = frozenset()
    round: int = 0
    plan: RoundPlan | None = None
    received: Mapping[str, tuple[Phase, bytes]] = field(default_factory=dict)
    contributions: tuple[Contribution, ...] = ()
    gone: frozenset[str] = frozenset()
    overtime: bool = False
    finished: bool = False

    @property
    def waiting(self) -> tuple[str, ...]:
        """Ordered devices that have not uploaded, in name order."""
        return () if self.plan is None else tuple(sorted(d for d in self.plan.orders if d not in self.received))


Transition = tuple[EngineState, tuple[Action, ...]]


class Engine:
    """The rules of one run.

    Attributes:
        run: the owner's plan; strategy: the algorithm; seed: 16 random bytes from which round nonces follow.
    """

    def __init__(self, run: RunPlan, strategy: Strategy, seed: bytes) -> None:
        self.run = run
        self.strategy = strategy
        self.seed = seed

    def begin(self, devices: tuple[str, ...]) -> Transition:
        """Return the state before round 1."""
        return EngineState(devices, self.strategy.init(devices)), (Gather(),)

    def resume(self, devices: tuple[str, ...], before: Any, round_: int, available: tuple[str, ...]) -> Transition:
        """Return the state with round ``round_`` open again, from what `OpenRound` had made durable."""
        return self._open(EngineState(devices, before, frozenset(available)), round_, available)

    def nonce(self, round_: int) -> bytes:
        """Return the 16 bytes that an upload of the round must repeat."""
        return hashlib.sha256(b"shoal/v1/round" + self.seed + round_.to_bytes(4, "little")).digest()[:16]

    def judge(self, state: EngineState, upload: Upload, digest: bytes) -> tuple[Verdict, str]:
        """Return whether an authentic upload may be stored, and the reason where not. Changes nothing.

        Exactly once: the first durable upload of (run, round, phase, device) wins; the same bytes again are a
            duplicate, other bytes are refused.
        """
        run, plan = self.run, state.plan
        if (upload.run_id, upload.epoch, upload.task_digest) != (run.run_id, run.epoch, run.task_digest):
            return Verdict.REFUSE, "of another run, epoch or task"
        if (upload.mode, upload.key_id) != (run.mode, run.key_id):
            return Verdict.REFUSE, "masked under another key or mode"
        if plan is None or upload.round != state.round or upload.nonce != self.nonce(state.round):
            return Verdict.REFUSE, "the round is not open"
        order = plan.orders.get(upload.device)
        if order is None or order.phase != upload.phase:
            return Verdict.REFUSE, "not asked for"
        done = state.received.get(upload.device)
        if done is not None:
            same = done == (Phase(upload.phase), digest)
            return (Verdict.DUPLICATE, "") if same else (Verdict.REFUSE, "another upload was stored before")
        if upload.model not in order.candidates:
            return Verdict.REFUSE, "trained from a model that was not offered"
        if upload.length != (run.length if order.train else 0):
            return Verdict.REFUSE, f"a vector of length {upload.length}"
        if len(upload.margins) != (len(order.candidates) if order.margins else 0):
            return Verdict.REFUSE, f"{len(upload.margins)} margins"
        if (
            upload.correct > upload.tested
            or bool(upload.tested) != order.evaluate
            or (order.train and not upload.samples)
        ):
            return Verdict.REFUSE, "impossible counts"
        if abs(upload.loss) > MAX_FIGURE or any(abs(m) > MAX_MARGIN for m in upload.margins):
            return Verdict.REFUSE, "a loss or a margin beyond what a device may report"
        if not (0 < upload.model_norm <= MAX_FIGURE if order.norm else upload.model_norm == 0):
            return Verdict.REFUSE, "a model's norm that was not asked for, or an impossible one"
        return Verdict.STORE, ""

    def handle(self, state: EngineState, event: Event) -> Transition:
        """Return the state after ``event`` and what the driver has to do."""
        if state.finished:
            return state, ()
        match event:
            case CameOnline(device):
                if device not in state.devices:
                    state = dataclasses.replace(state, devices=(*state.devices, device))
                state = dataclasses.replace(state, online=state.online | {device}, gone=state.gone - {device})
            case WentOffline(device):
                state = _without(state, device)
            case Left(device):
                staying = tuple(d for d in state.devices if d != device)
                state = dataclasses.replace(_without(state, device), devices=staying)
            case Stored(contribution, digest):
                state = self._receive(state, contribution, digest)
            case DeadlinePassed(round_):
                if round_ == state.round:
                    state = dataclasses.replace(state, overtime=True)
        return self._advance(state)

    def _receive(self, state: EngineState, contribution: Contribution, digest: bytes) -> EngineState:
        if contribution.device in state.received:
            return state
        strategy = state.strategy
        if not (state.plan and state.plan.final):
            strategy = self.strategy.absorb(strategy, contribution)
        return dataclasses.replace(
            state,
            strategy=strategy,
            received={**state.received, contribution.device: (contribution.phase, digest)},
            contributions=(*state.contributions, contribution),
            gone=state.gone - {contribution.device},
        )

    def _advance(self, state: EngineState) -> Transition:
        if state.plan is None:
            return self._maybe_open(state)
        # Whoever was revoked can't answer, so that the quorum is of those who still can.
        asked = sum(d in state.devices or d in state.received for d in state.plan.orders)
        needed = max(1, math.ceil(self.run.quorum * asked))
        if len(state.received) < needed:
            return self._close(state) if _forsaken(state) else (state, ())
        if set(state.waiting) - state.gone and not state.overtime:
            return state, ()
        return self._close(state)

    def _maybe_open(self, state: EngineState) -> Transition:
        """Open a round with whoever is there, as soon as enough are.

        The first round waits for all devices, later ones for the quorum's share of them; once the deadline has passed,
        ``min_contributors`` are enough.
        """
        present = tuple(d for d in sorted(state.devices) if d in state.online)
        if len(present) < max(1, min(self.run.min_contributors, len(state.devices))):
            return state, ()
        share = 1.0 if state.round == 0 else self.run.quorum
        if len(present) < math.ceil(share * len(state.devices)) and not state.overtime:
            return state, ()
        return self._open(state, state.round + 1, present)

    def _open(self, state: EngineState, round_: int, available: tuple[str, ...]) -> Transition:
        before = state.strategy
        if round_ > self.run.rounds:
            plan = self.strategy.final(before, round_, available)
            after = before
        else:
            after, plan = self.strategy.plan(before, round_, available)
        if not plan.orders:
            return state, ()
        state = dataclasses.replace(
            state,
            strategy=after,
            round=round_,
            plan=plan,
            received={},
            contributions=(),
            gone=frozenset(d for d in plan.orders if d not in state.online),
            overtime=False,
        )
        return state, (OpenRound(plan, self.nonce(round_), before, available),)

    def _close(self, state: EngineState) -> Transition:
        plan = state.plan
        assert plan is not None
        if plan.final:
            outcome = Outcome({c.device: c.model for c in state.contributions})
            strategy = state.strategy
        else:
            strategy, outcome = self.strategy.close(state.strategy, plan)
        closed = RoundClosed(record_of(state, plan, outcome))
        state = dataclasses.replace(state, strategy=strategy, plan=None, finished=plan.final, overtime=False)
        if plan.final:
            return state, (closed, RunFinished())
        state, actions = self._maybe_open(state)
        return state, (closed, *(actions or (Gather(),)))


def _without(state: EngineState, device: str) -> EngineState:
    """Return the state in which the device is not there: the open round does not wait for it."""
    ordered = state.plan is not None and device in state.plan.orders
    gone = state.gone | {device} if ordered else state.gone
    return dataclasses.replace(state, online=state.online - {device}, gone=gone)


def _forsaken(state: EngineState) -> bool:
    """Whether the deadline has passed, all that the open round asked went away without an answer, and others are there.

    A round may ask very few, a newcomer's cold start one device: the fleet does not wait for these to come back.
    """
    plan = state.plan
    if plan is None or plan.final or state.received or not state.overtime:
        return False
    return not set(state.waiting) - state.gone and bool(state.online - plan.orders.keys())


def record_of(state: EngineState, plan: RoundPlan, outcome: Outcome) -> RoundRecord:
    """Return the closed round in figures."""
    given = sorted(state.contributions, key=lambda c: c.device)
    samples = sum(c.samples for c in given)
    return RoundRecord(
        round=plan.round,
        final=plan.final,
        ordered=len(plan.orders),
        contributed=len(given),
        missing=state.waiting,
        loss=sum(c.loss * c.samples for c in given) / samples if samples else 0.0,
        correct=sum(c.correct for c in given),
        tested=sum(c.tested for c in given),
        norms={c.device: c.norm for c in given},
        clusters=outcome.clusters,
        events=tuple({"round": e.round, "kind": e.kind, **e.detail} for e in outcome.events),
        device_accuracy={c.device: (c.correct, c.tested) for c in given if c.tested},
    )
