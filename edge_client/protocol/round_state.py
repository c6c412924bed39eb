"""The device's state machine for a round: it reacts to announcements, models, finished jobs and answers, without I/O.

`step` is a pure transition ``(state, event) -> (state, actions)``: it uses no clock, socket, disk or random source. All events
have been decrypted and verified before; the runtime carries out the actions. `TRANSITIONS` lists the changes of stage.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from types import MappingProxyType
from typing import Final

from crypto.seal.replay import ReplayWatermark
from edge_client.run.policy import check_announcement, check_assignment
from shoal import limits
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import Action, Announcement, Assignment, Control


class Stage(Enum):
    """The device's stage in a round."""

    IDLE = "idle"
    FETCHING = "fetching models"
    WORKING = "working"
    SENDING = "sending"


@dataclass(frozen=True, slots=True)
class RoundState:
    """The device's state.

    Attributes:
        index: the device's index in the roster.
        mark: the replay watermark.
        plan: the plan of the run that the device follows.
        announcement, assignment: the current round, and the device's part in it.
        models: topic label -> transfer id of the models received.
        needed: the same for those that the assignment needs; None until they are located.
        transfer: id of the sealed upload; sent: (run, round, nonce) of its round; attempt: reminders so far.
        answered: the upload was a final round's and was answered, so that no reminder follows, even after a restart.
        done: the upload of the announced round was answered; refused: it was refused, and a reminder is sent if the same
            round is announced again, since an aggregator that has resumed the run may want the upload.
        wasted: transfer id of the last upload that was refused and not acknowledged later.
    """

    index: int
    mark: ReplayWatermark = field(default_factory=ReplayWatermark)
    stage: Stage = Stage.IDLE
    plan: RunPlan | None = None
    announcement: Announcement | None = None
    assignment: Assignment | None = None
    models: Mapping[str, bytes] = field(default_factory=dict)
    needed: Mapping[str, bytes] | None = None
    transfer: bytes = b""
    sent: tuple[int, int, bytes] | None = None
    answered: bool = False
    attempt: int = 0
    done: bool = False
    refused: bool = False
    wasted: bytes = b""


@dataclass(frozen=True, slots=True)
class Planned:
    """A run plan was accepted.

    ``lost``: an upload of the final round was stored before a restart, but the final model is not on disk.
    """

    plan: RunPlan
    lost: bool = False


@dataclass(frozen=True, slots=True)
class Announced:
    """The aggregator announced a round of the plan."""

    announcement: Announcement


@dataclass(frozen=True, slots=True)
class ModelArrived:
    """A mean or a checkpoint was decrypted and checked."""

    label: str
    transfer: bytes


@dataclass(frozen=True, slots=True)
class Located:
    """The transfers that the assignment of the round with ``nonce`` needs: topic label -> transfer id.

    ``arrived``: the same for those that are here; ``ahead``: labels at which the next round's transfers are expected.
    """

    nonce: bytes
    transfers: Mapping[str, bytes]
    arrived: Mapping[str, bytes] = field(default_factory=dict)
    ahead: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class WorkDone:
    """The job of a round has finished and its sealed upload is stored."""

    run: int
    round: int
    nonce: bytes
    transfer: bytes


@dataclass(frozen=True, slots=True)
class WorkFailed:
    """The job of a round failed, or a state that it needs is out of reach; the device skips the round."""

    nonce: bytes


@dataclass(frozen=True, slots=True)
class Answered:
    """The aggregator answered an upload."""

    control: Control


@dataclass(frozen=True, slots=True)
class TimerFired:
    """The reminder timer has expired."""


@dataclass(frozen=True, slots=True)
class Reconnected:
    """The connection to the broker is restored; messages in flight may be lost."""


@dataclass(frozen=True, slots=True)
class Ended:
    """The run has ended before its time: the owner has replaced its aggregator, and nobody takes the upload."""


Event = (
    Planned | Announced | ModelArrived | Located | WorkDone | WorkFailed | Answered | TimerFired | Reconnected | Ended
)


@dataclass(frozen=True, slots=True)
class Follow:
    """Subscribe to the means and checkpoints with these topic labels, and to no others."""

    labels: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Locate:
    """Find out which transfers the assignment needs, and answer with `Located`."""

    announcement: Announcement
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class Work:
    """Start the job of the assignment: score, choose, train, mask, seal, store."""

    announcement: Announcement
    assignment: Assignment


@dataclass(frozen=True, slots=True)
class CancelWork:
    """Cancel the running job; its result is no longer needed."""


@dataclass(frozen=True, slots=True)
class Send:
    """Send the stored upload for the first time, or those ``chunks`` of it that the aggregator asked for."""

    chunks: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Remind:
    """Send a reminder, so that the aggregator answers the stored upload or asks for the chunks that it misses."""

    run_id: bytes
    reconnected: bool = False


@dataclass(frozen=True, slots=True)
class RunDone:
    """The run is over for this device: its last upload was answered. This is repeated after a restart."""

    plan: RunPlan


Do = Follow | Locate | Work | CancelWork | Send | Remind | RunDone
Transition = tuple[RoundState, tuple[Do, ...]]

_DROPPED: Final[Mapping[type[Event], str]] = {
    Announced: "next round without an assignment",
    Planned: "newer plan",
    Ended: "aggregator replaced",
}
TRANSITIONS: Final[Mapping[tuple[Stage, Stage], Mapping[type[Event], str]]] = MappingProxyType(
    {
        (Stage.IDLE, Stage.FETCHING): {Announced: "round with an assignment"},
        (Stage.IDLE, Stage.SENDING): {Announced: "round of the stored or refused upload"},
        (Stage.FETCHING, Stage.WORKING): {ModelArrived: "last model arrives", Located: "no model missing"},
        (Stage.FETCHING, Stage.IDLE): {WorkFailed: "a state is out of reach", **_DROPPED},
        (Stage.WORKING, Stage.SENDING): {WorkDone: "upload stored"},
        (Stage.WORKING, Stage.FETCHING): {Announced: "next round"},
        (Stage.WORKING, Stage.IDLE): {WorkFailed: "work failed", **_DROPPED},
        (Stage.SENDING, Stage.IDLE): {Answered: "upload answered", **_DROPPED},
        (Stage.SENDING, Stage.FETCHING): {Announced: "next round"},
    }
)
"""The changes of stage, and the events that cause each of them. Events that change no stage are not listed."""


def step(state: RoundState, event: Event) -> Transition:
    """Return the state after ``event`` and the actions to carry out.

    Raises:
        UntrustedError: the announcement is a replay, or the plan does not allow it; the state is unchanged.
    """
    match event:
        case Planned():
            return _planned(state, event)
        case Announced(announcement):
            return _announced(state, announcement)
        case ModelArrived(label, transfer):
            state = replace(state, models={**state.models, label: transfer})
            return _maybe_work(state) if state.stage is Stage.FETCHING else (state, ())
        case Located(nonce, transfers, arrived, ahead):
            if state.stage is not Stage.FETCHING or nonce != state.mark.nonce:
                return state, ()
            return _fetch(replace(state, models=arrived), transfers, ahead)
        case WorkDone():
            return _work_done(state, event)
        case WorkFailed(nonce):
            if state.stage in (Stage.FETCHING, Stage.WORKING) and nonce == state.mark.nonce:
                # Unsubscribe: the means of a round that the device skips would arrive for nothing.
                unused = (Follow(()),) if state.stage is Stage.FETCHING else ()
                return replace(state, stage=Stage.IDLE, done=True), unused
            return state, ()
        case Answered(control):
            return _answered(state, control)
        case Ended():
            state = replace(state, announcement=None, assignment=None, stage=Stage.IDLE, done=True, refused=False)
            return replace(state, models={}), (CancelWork(), Follow(()))
        case TimerFired() | Reconnected():
            if state.stage is not Stage.SENDING:
                return state, ()
            reconnected = isinstance(event, Reconnected)
            state = replace(state, attempt=0 if reconnected else state.attempt + 1)
            return state, (_remind(state, reconnected),)


def _planned(state: RoundState, planned: Planned) -> Transition:
    plan = planned.plan
    if state.plan is not None and plan.run < state.plan.run:
        return state, ()
    if state.plan == plan:
        return state, ()
    state = replace(
        state,
        plan=plan,
        announcement=None,
        assignment=None,
        stage=Stage.IDLE,
        models={},
        sent=None if planned.lost else state.sent,
        done=False,
        refused=False,
    )
    return state, (CancelWork(), Follow(()))


def _announced(state: RoundState, announcement: Announcement) -> Transition:
    assert state.plan is not None
    check_announcement(announcement, state.plan)
    mark = state.mark.accept(announcement)
    assignment = announcement.order_for(state.index)
    if assignment is not None:
        check_assignment(assignment, announcement, state.plan)
    again = mark.place == state.mark.place
    if again and (state.stage is Stage.SENDING or state.refused):
        # The aggregator restarted or resumed the run, and may have lost our upload.
        state = replace(
            state, announcement=announcement, mark=mark, stage=Stage.SENDING, attempt=0, done=False, refused=False
        )
        return state, (_remind(state),)
    if again and (state.stage is Stage.WORKING or state.done):
        return replace(state, announcement=announcement, mark=mark), ()
    stop: tuple[Do, ...] = () if state.stage is Stage.IDLE else (CancelWork(),)
    state = replace(
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
        # Unsubscribe: a device that sits out a round would still receive every model that it follows.
        return replace(state, models={}), (*stop, Follow(()))
    if state.sent == (announcement.run, announcement.round, announcement.nonce):
        if state.answered:
            assert state.plan is not None
            return replace(state, done=True), (*stop, RunDone(state.plan))
        # The upload was stored before a restart: the aggregator may have it, so remind before sending it again.
        state = replace(state, stage=Stage.SENDING)
        return state, (*stop, _remind(state))
    state = replace(state, stage=Stage.FETCHING, needed=None)
    return state, (*stop, Locate(announcement, assignment))


def _fetch(state: RoundState, needed: Mapping[str, bytes], ahead: tuple[str, ...]) -> Transition:
    kept = {label: t for label, t in state.models.items() if label in needed}
    state, do = _maybe_work(replace(state, models=kept, needed=needed))
    return state, (Follow(tuple(sorted({*needed, *ahead}))), *do)


def _maybe_work(state: RoundState) -> Transition:
    assert state.announcement is not None
    assert state.assignment is not None
    if state.needed is None or any(state.models.get(label) != t for label, t in state.needed.items()):
        return state, ()
    return replace(state, stage=Stage.WORKING), (Work(state.announcement, state.assignment),)


def _work_done(state: RoundState, work: WorkDone) -> Transition:
    current = (state.mark.run, state.mark.round, state.mark.nonce)
    if state.stage is not Stage.WORKING or (work.run, work.round, work.nonce) != current:
        return state, ()
    state = replace(state, stage=Stage.SENDING, transfer=work.transfer, sent=current, attempt=0, answered=False)
    return state, (Send(),)


def _answered(state: RoundState, control: Control) -> Transition:
    if state.stage is not Stage.SENDING or control.transfer != state.transfer:
        return state, ()
    if control.action == Action.NACK:
        return replace(state, attempt=0), (Send(control.missing),)
    wasted = state.transfer if control.action == Action.REFUSED else b""
    state = replace(state, stage=Stage.IDLE, done=True, wasted=wasted)
    if state.announcement is None or not state.announcement.finished or state.plan is None:
        return replace(state, refused=control.action == Action.REFUSED), ()
    return replace(state, answered=True), (RunDone(state.plan),)


def _remind(state: RoundState, reconnected: bool = False) -> Remind:
    assert state.plan is not None
    return Remind(state.plan.run_id, reconnected)


def remind_within_s(state: RoundState) -> float:
    """Return the longest time before the next reminder: it starts at twice the announced pause and doubles up to a cap."""
    announced_s = limits.REMIND_BASE_S if state.announcement is None else state.announcement.remind_after_s
    base_s = min(max(announced_s, limits.REMIND_BASE_S), limits.MAX_REMIND_AFTER_S)
    cap_s = limits.REMIND_CAP_S if state.attempt < limits.REMINDERS_SOON else limits.REMIND_LATE_CAP_S
    return min(max(cap_s, 2.0 * base_s), base_s * 2.0 ** min(state.attempt + 1, 10))
