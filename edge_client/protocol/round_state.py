"""The device's rules, free of I/O: what to do about an announcement, a model, a finished piece of work, an answer.

`step` is a pure transition ``(state, event) -> (state, actions)``: no clock, socket or disk, no random source.
Everything that reaches it has been opened and verified; the runtime carries the actions out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from crypto.seal.replay import ReplayWatermark
from edge_client.run.policy import check_announcement, check_assignment
from shoal import limits
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import NO_TRANSFER, Action, Announcement, Assignment, Control, ModelRef, Phase


class Stage(Enum):
    """What the device is doing."""

    IDLE = "idle"
    FETCHING = "fetching models"
    WORKING = "working"
    SENDING = "sending"


@dataclass(frozen=True, slots=True)
class AgentState:
    """Where the device stands.

    Attributes:
        index: its place in the roster.
        mark: what it has accepted so far.
        plan: the run that it follows, as it stands in this mask epoch; since: the round after which the epoch began.
        generation: roster sequence of the secrets that the epoch is made with.
        announcement, order: the round that it is in, and its part.
        models: topic label -> transfer id of the models at hand.
        transfer: id of its sealed upload; sent: of which round; attempt: reminders so far.
        answered: nobody is reminded of that upload any more, also after a restart: it was a final round's, and was answered.
        done: the upload of the announced round was answered; refused: it was refused, and is offered again if the same
            round is announced again: an aggregator that has taken the run up again may want it.
    """

    index: int
    mark: ReplayWatermark = field(default_factory=ReplayWatermark)
    stage: Stage = Stage.IDLE
    plan: RunPlan | None = None
    since: int = 0
    generation: int = 0
    announcement: Announcement | None = None
    assignment: Assignment | None = None
    models: Mapping[str, bytes] = field(default_factory=dict)
    transfer: bytes = b""
    sent: tuple[int, int, bytes] | None = None
    answered: bool = False
    attempt: int = 0
    done: bool = False
    refused: bool = False


@dataclass(frozen=True, slots=True)
class Planned:
    """A run plan of the owner's was accepted, or its next mask epoch: ``since`` and ``generation`` as in `package.Run`.

    ``lost``: the final model that an upload from before a restart stands for is not on the disk.
    """

    plan: RunPlan
    since: int = 0
    generation: int = 0
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Announced:
    """The aggregator announced a round of the plan."""

    announcement: Announcement


@dataclass(frozen=True, slots=True)
class ModelArrived:
    """A model was opened and checked."""

    label: str
    transfer: bytes


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The order of a round was carried out and its upload sealed and kept."""

    run: int
    round: int
    nonce: bytes
    transfer: bytes


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """The order of a round could not be carried out; the device sits this round out."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class Answered:
    """The aggregator answered an upload."""

    control: Control


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The upload has gone unanswered for long enough."""


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The broker is back: what was in flight may be lost."""


Event = Planned | Announced | ModelArrived | WorkDone | WorkFailed | Answered | TimerFired | Reconnected


@dataclass(frozen=True, slots=True)
class Follow:
    """Receive exactly the models behind these topic labels."""

    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Work:
    """Carry out the order: score, choose, train, mask, seal, keep."""

    announcement: Announcement
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class CancelWork:
    """What is being computed is not wanted any more."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send the kept upload for the first time, or these chunks of it, which were asked for."""

    transfer: bytes
    chunks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Remind:
    """Make the aggregator answer the kept upload, or ask for what it misses of it."""

    transfer: bytes
    run_id: bytes
    reconnected: bool = False


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Fire once, at a random moment within this many seconds (full jitter)."""

    within_s: float


@dataclass(frozen=True, slots=True)
class ClearTimer:
    """No timer any more."""


@dataclass(frozen=True, slots=True)
class RunDone:
    """The device's part in the run is over: its last upload was answered; a restart changes nothing in that."""

    plan: RunPlan


Do = Follow | Work | CancelWork | Send | Remind | SetTimer | ClearTimer | RunDone
Transition = tuple[AgentState, tuple[Do, ...]]


def step(state: AgentState, event: Event) -> Transition:
    """Return the state after ``event`` and what to do.

    Raises:
        UntrustedError: the announcement goes back in time or beyond the plan; the state stays as it was.
    """
    match event:
        case Planned():
            return _planned(state, event)
        case Announced(announcement):
            return _announced(state, announcement)
        case ModelArrived(label, transfer):
            state = dataclasses.replace(state, models={**state.models, label: transfer})
            return _maybe_work(state) if state.stage is Stage.FETCHING else (state, ())
        case WorkDone():
            return _work_done(state, event)
        case WorkFailed(nonce):
            if state.stage is Stage.WORKING and nonce == state.mark.nonce:
                return dataclasses.replace(state, stage=Stage.IDLE, done=True), ()
            return state, ()
        case Answered(control):
            return _answered(state, control)
        case TimerFired() | Reconnected():
            if state.stage is not Stage.SENDING:
                return state, ()
            reconnected = isinstance(event, Reconnected)
            state = dataclasses.replace(state, attempt=0 if reconnected else state.attempt + 1)
            return state, (_remind(state, reconnected), _timer(state))


def _planned(state: AgentState, planned: Planned) -> Transition:
    plan = planned.plan
    if state.plan is not None and plan.run < state.plan.run:
        return state, ()
    if state.plan == plan:
        return state, ()
    state = dataclasses.replace(
        state,
        plan=plan,
        since=planned.since,
        generation=planned.generation,
        announcement=None,
        assignment=None,
        stage=Stage.IDLE,
        models={},
        sent=None if planned.lost else state.sent,
        done=False,
        refused=False,
    )
    return state, (CancelWork(), ClearTimer(), Follow(()))


def _announced(state: AgentState, announcement: Announcement) -> Transition:
    assert state.plan is not None
    check_announcement(announcement, state.plan, state.since, state.generation)
    mark = state.mark.accept(announcement)
    assignment = announcement.order_for(state.index)
    if assignment is not None:
        check_assignment(assignment, announcement, state.plan, state.generation)
    again = mark.place == state.mark.place
    if again and (state.stage is Stage.SENDING or state.refused):
        # The aggregator was started again, or has taken the run up again: it may not have what we sent.
        state = dataclasses.replace(
            state, announcement=announcement, mark=mark, stage=Stage.SENDING, attempt=0, done=False, refused=False
        )
        return state, (_remind(state), _timer(state))
    if again and (state.stage is Stage.WORKING or state.done):
        return dataclasses.replace(state, announcement=announcement, mark=mark), ()
    stop: tuple[Do, ...] = () if state.stage is Stage.IDLE else (CancelWork(), ClearTimer())
    state = dataclasses.replace(
        state,
        announcement=announcement,
        assignment=assignment,
        mark=mark,
        stage=Stage.IDLE,
        attempt=0,
        done=assignment is None,
        refused=False,
    )
    if assignment is None:
        # Whoever sits out would still be sent every model that it follows.
        return dataclasses.replace(state, models={}), (*stop, Follow(()))
    if state.sent == (announcement.run, announcement.round, announcement.nonce):
        if state.answered:
            assert state.plan is not None
            return dataclasses.replace(state, done=True), (*stop, RunDone(state.plan))
        # Sealed before a restart: the aggregator may have it.
        state = dataclasses.replace(state, stage=Stage.SENDING)
        return state, (*stop, _remind(state), _timer(state))
    needed = tuple(sorted(ref.label for ref in needed_models(announcement, assignment)))
    kept = {label: t for label, t in state.models.items() if label in needed}
    state, do = _maybe_work(dataclasses.replace(state, stage=Stage.FETCHING, models=kept))
    return state, (*stop, Follow(needed), *do)


def needed_models(announcement: Announcement, assignment: Assignment) -> tuple[ModelRef, ...]:
    """Return what must be fetched: the candidates' offsets and, with weight sharing, the part they have in common.

    Whoever folds also needs the vectors that are no models; whoever signs, what was folded.
    """
    candidates = [m for m in announcement.models if m.model in assignment.candidates]
    if announcement.shared is not None:
        candidates.append(announcement.shared)
    if assignment.phase == Phase.CHECKPOINT:
        candidates.extend(announcement.carried)
    if announcement.proposal is not None:
        candidates.append(announcement.proposal)
    return tuple(m for m in candidates if m.transfer != NO_TRANSFER)


def _maybe_work(state: AgentState) -> Transition:
    assert state.announcement is not None
    assert state.assignment is not None
    missing = [
        r for r in needed_models(state.announcement, state.assignment) if state.models.get(r.label) != r.transfer
    ]
    if missing:
        return state, ()
    return dataclasses.replace(state, stage=Stage.WORKING), (Work(state.announcement, state.assignment),)


def _work_done(state: AgentState, work: WorkDone) -> Transition:
    current = (state.mark.run, state.mark.round, state.mark.nonce)
    if state.stage is not Stage.WORKING or (work.run, work.round, work.nonce) != current:
        return state, ()
    state = dataclasses.replace(state, stage=Stage.SENDING, transfer=work.transfer, sent=current, attempt=0)
    state = dataclasses.replace(state, answered=False)
    return state, (Send(work.transfer), _timer(state))


def _answered(state: AgentState, control: Control) -> Transition:
    if state.stage is not Stage.SENDING or control.transfer != state.transfer:
        return state, ()
    if control.action == Action.NACK:
        state = dataclasses.replace(state, attempt=0)
        return state, (Send(state.transfer, control.missing), _timer(state))
    state = dataclasses.replace(state, stage=Stage.IDLE, done=True)
    if state.announcement is None or not state.announcement.finished or state.plan is None:
        return dataclasses.replace(state, refused=control.action == Action.REFUSED), (ClearTimer(),)
    return dataclasses.replace(state, answered=True), (ClearTimer(), RunDone(state.plan))


def _remind(state: AgentState, reconnected: bool = False) -> Remind:
    assert state.plan is not None
    return Remind(state.transfer, state.plan.run_id, reconnected)


def _timer(state: AgentState) -> SetTimer:
    """Return the timer of the next reminder: its bound begins at twice the announced pause and doubles up to a cap."""
    announced_s = limits.REMIND_BASE_S if state.announcement is None else state.announcement.remind_after_s
    base_s = min(max(announced_s, limits.REMIND_BASE_S), limits.MAX_REMIND_AFTER_S)
    cap_s = limits.REMIND_CAP_S if state.attempt < limits.REMINDERS_SOON else limits.REMIND_LATE_CAP_S
    return SetTimer(min(max(cap_s, 2.0 * base_s), base_s * 2.0 ** min(state.attempt + 1, 10)))
