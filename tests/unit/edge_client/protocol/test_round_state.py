"""The device's state machine: the transition for each event, stage by stage."""

import dataclasses

import pytest

from crypto.seal.replay import ReplayWatermark
from edge_client.protocol.round_state import (
    TRANSITIONS,
    Announced,
    Answered,
    CancelWork,
    ClearTimer,
    Ended,
    Follow,
    Locate,
    Located,
    ModelArrived,
    Planned,
    Reconnected,
    Remind,
    RoundState,
    RunDone,
    Send,
    SetTimer,
    Stage,
    TimerFired,
    Work,
    WorkDone,
    WorkFailed,
    step,
)
from shoal import limits
from shoal.errors import UntrustedError
from shoal.protocol.messages import NO_ASSIGNMENT, Action, Announcement, Assignment, Control, Phase, Share
from shoal.protocol.states import Offer, RoundModels, StateId
from tests.helpers.plans import run_plan

PLAN = run_plan(max_models=3, origins=2, rounds=5)
TRAIN = Assignment(int(Phase.TRAIN), (0, 1), int(Share.TRAIN), train=True, evaluate=False, margins=False)
REPORT = Assignment(int(Phase.SCORE), (0,), int(Share.TRAIN), train=False, evaluate=True, margins=False)
MODELS = RoundModels(key_version=3, offers=(Offer(0, StateId(0, 0)), Offer(1, StateId(1, 0))))
ID = b"transfer-of-mine"
REMIND = Remind(ID, PLAN.run_id)


def announcement(round_=1, **changes):
    fields = {
        "fleet": "demo",
        "run": 1,
        "run_id": PLAN.run_id,
        "roster_sequence": 3,
        "round": round_,
        "nonce": bytes([round_]) * 16,
        "deadline_s": 60.0,
        "finished": round_ > PLAN.recipe.rounds,
        "held": MODELS,
        "assignments": (TRAIN,),
        "assignment_of": (0, NO_ASSIGNMENT),
    }
    return Announcement(**{**fields, **changes})


FINAL = announcement(6, assignments=(REPORT,))


def after(*events, index=0, state=None):
    """Return the state and the last event's actions, from a device that follows the plan."""
    actions = ()
    state = state or step(RoundState(index), Planned(PLAN))[0]
    for event in events:
        state, actions = step(state, event)
    return state, actions


def control(action, missing=(), transfer=ID, round_=1):
    return Answered(
        Control(
            fleet="demo",
            device="dev-1",
            action=int(action),
            run=1,
            round=round_,
            transfer=transfer,
            missing=missing,
            reason="",
        )
    )


def offered(*offers):
    return dataclasses.replace(MODELS, offers=offers)


MEANS = {"bb": b"\1" * 16}
LOCATED = Located(b"\1" * 16, MEANS)
ARRIVED = ModelArrived("bb", b"\1" * 16)
DONE = WorkDone(1, 1, b"\1" * 16, ID)
WORKING = (Announced(announcement()), LOCATED, ARRIVED)
SENDING = (*WORKING, DONE)


def test_a_plan_starts_from_nothing():
    state, actions = step(RoundState(0), Planned(PLAN))
    assert actions == (CancelWork(), ClearTimer(), Follow(()))
    assert (state.plan, state.stage) == (PLAN, Stage.IDLE)
    assert step(state, Planned(PLAN)) == (state, ())


def test_an_older_plan_is_not_taken_up():
    newer = dataclasses.replace(PLAN, run=2)
    state, _ = step(RoundState(0), Planned(newer))
    assert step(state, Planned(PLAN)) == (state, ())


def test_cancelled_work_is_dropped():
    """Work that ends after it was cancelled is dropped."""
    state, _ = after(*WORKING, Announced(announcement(2, assignment_of=(NO_ASSIGNMENT,))))
    assert step(state, DONE) == (state, ())


def test_refused_uploads_residual_is_wasted():
    """The residual of a refused upload is wasted unless it is acknowledged later."""
    refused, _ = after(*SENDING, control(Action.REFUSED))
    assert refused.wasted == refused.transfer == ID
    again, _ = step(refused, Announced(announcement()))
    taken, _ = step(again, control(Action.ACK))
    assert taken.wasted == b""
    later, _ = step(refused, Announced(announcement(2)))
    assert later.wasted == ID


def test_answer_to_another_upload_is_nothing():
    """An answer to another upload means nothing."""
    state, _ = after(*SENDING)
    assert step(state, control(Action.ACK, transfer=bytes(16))) == (state, ())
    idle, _ = after()
    assert step(idle, control(Action.ACK)) == (idle, ())


def test_only_missing_chunks_are_sent():
    state, actions = after(*SENDING, TimerFired(), control(Action.NACK, missing=(1, 4)))
    assert (state.stage, state.attempt) == (Stage.SENDING, 0)
    assert actions == (Send(ID, (1, 4)), SetTimer(2 * limits.REMIND_BASE_S))


@pytest.mark.parametrize(("announced_s", "base_s"), [(20.0, 20.0), (0.0, 1.0), (-5.0, 1.0), (1e9, 600.0)])
def test_announced_pause_bounds_reminders(announced_s, base_s):
    """A large fleet's reminders would come while the aggregator still works on the uploads."""
    opening = Announced(dataclasses.replace(announcement(), remind_after_s=announced_s))
    state, actions = after(opening, *SENDING[1:])
    assert actions == (Send(ID), SetTimer(2 * base_s))
    bounds = []
    for _ in range(14):
        state, (_, timer) = step(state, TimerFired())
        bounds.append(timer.within_s)
    assert min(bounds) >= 2 * base_s
    assert bounds[-1] == max(60.0, 2 * base_s)


def test_restart_reminds_of_stored_upload():
    """Mark and transfer come from disk; the round is announced; nothing is computed."""
    kept = RoundState(0, ReplayWatermark(3, 1, 1, b"\1" * 16), transfer=ID, sent=(1, 1, b"\1" * 16))
    state, actions = after(Planned(PLAN), Announced(announcement()), state=kept)
    assert state.stage is Stage.SENDING
    assert actions == (REMIND, SetTimer(2 * limits.REMIND_BASE_S))


@pytest.mark.parametrize(
    "bad",
    [
        announcement(run_id=bytes(16)),
        announcement(7),
        announcement(held=offered(Offer(0, StateId(0, 0)), Offer(1, StateId(2, 0)))),
        announcement(held=offered(Offer(0, StateId(0, 0)))),
        announcement(roster_sequence=2),
        announcement(2, nonce=b"\1" * 16, round=1, finished=True),
    ],
)
def test_announcement_beyond_plan_is_nothing(bad):
    """An announcement beyond the plan changes nothing."""
    state, _ = after(Announced(announcement()))
    with pytest.raises(UntrustedError):
        step(state, Announced(bad))
    assert after(LOCATED, ARRIVED, state=state)[0].stage is Stage.WORKING


def test_final_answer_outlives_a_restart():
    """The announcement is retained for as long as no other run begins: nothing is sent, and the run is over."""
    sent = (1, 6, b"\6" * 16)
    mark = ReplayWatermark(3, 1, 6, b"\6" * 16)
    state, _ = step(RoundState(0, mark, transfer=ID, sent=sent, answered=True), Planned(PLAN))
    state, actions = step(state, Announced(FINAL))
    assert actions == (RunDone(PLAN),)
    assert (state.stage, state.done) == (Stage.IDLE, True)
    assert step(state, Announced(FINAL)) == (state, ())


SITS_OUT = (NO_ASSIGNMENT, NO_ASSIGNMENT)
ROUNDS = (
    announcement(),
    announcement(assignment_of=SITS_OUT),
    announcement(2),
    announcement(2, assignment_of=SITS_OUT),
    FINAL,
)


def events_in(state):
    """Return every event of a small run that the state may get next; work and answers are those of its own round."""
    mark = state.mark
    own = mark.nonce.ljust(16, b"\0")
    answers = [control(action, transfer=own, round_=mark.round) for action in (Action.ACK, Action.REFUSED, Action.NACK)]
    work = [WorkDone(mark.run, mark.round, own, own), WorkFailed(own)]
    models = [ARRIVED, ModelArrived("cc", b"\2" * 16)]
    located = [Located(own, {}), Located(own, MEANS)]
    plans = [Planned(PLAN), Planned(dataclasses.replace(PLAN, run=2))]
    return [*map(Announced, ROUNDS), *models, *located, *work, *answers, *plans, TimerFired(), Reconnected(), Ended()]


def changes_of_stage():
    """Return every (before, after, event type) with another stage after the event, over all states that can be reached."""
    found, seen = set(), set()
    waiting = [step(RoundState(0), Planned(PLAN))[0]]
    while waiting:
        state = waiting.pop()
        # The count of reminders only sets the timer; without a bound the search would have no end.
        state = dataclasses.replace(state, attempt=min(state.attempt, 1))
        if repr(state) in seen:
            continue
        seen.add(repr(state))
        restarted = RoundState(0, state.mark, transfer=state.transfer, sent=state.sent, answered=state.answered)
        waiting.append(step(restarted, Planned(PLAN))[0])
        for event in events_in(state):
            try:
                after, _ = step(state, event)
            except UntrustedError:
                continue
            waiting.append(after)
            if after.stage is not state.stage:
                found.add((state.stage, after.stage, type(event)))
    return found


@pytest.mark.slow
def test_exactly_the_listed_changes_happen():
    """The search covers every order of the events, with restarts between them."""
    assert changes_of_stage() == {(*change, event) for change, causes in TRANSITIONS.items() for event in causes}


def test_round_waits_for_located_transfers():
    """A round waits until its transfers are located and have arrived."""
    state, _ = after()
    state, actions = step(state, Announced(ROUNDS[0]))
    assert (state.stage, actions) == (Stage.FETCHING, (Locate(ROUNDS[0], TRAIN),))
    nonce = state.mark.nonce
    assert step(state, Located(b"another round's.", {})) == (state, ())
    assert step(state, Located(nonce, {}))[1] == (Follow(()), Work(ROUNDS[0], TRAIN))
    state, actions = step(state, Located(nonce, {"mean": ID}))
    assert (state.stage, actions) == (Stage.FETCHING, (Follow(("mean",)),))
    assert step(state, ModelArrived("mean", b"an earlier mean's"))[0].stage is Stage.FETCHING
    assert step(state, ModelArrived("mean", ID))[1] == (Work(ROUNDS[0], TRAIN),)


def test_unreachable_states_skip_the_round():
    """A round whose states are out of reach is skipped."""
    state, _ = after()
    state, _ = step(state, Announced(ROUNDS[0]))
    state, actions = step(state, WorkFailed(state.mark.nonce))
    assert (state.stage, state.done, actions) == (Stage.IDLE, True, (Follow(()),))


def test_replaced_aggregator_is_not_reminded():
    """Nobody is reminded of an upload whose aggregator was replaced."""
    state, _ = after()
    for event in (Announced(ROUNDS[0]), Located(ROUNDS[0].nonce, {}), WorkDone(1, 1, ROUNDS[0].nonce, ID)):
        state, _ = step(state, event)
    assert state.stage is Stage.SENDING
    state, actions = step(state, Ended())
    assert (state.stage, actions) == (Stage.IDLE, (CancelWork(), ClearTimer(), Follow(())))
    for event in (TimerFired(), Reconnected()):
        assert step(state, event) == (state, ())
