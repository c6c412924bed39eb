"""The device's state machine: the transition for each event, stage by stage."""

import dataclasses

import pytest

from crypto.seal.replay import ReplayWatermark
from edge_client.protocol.round_state import (
    TRANSITIONS,
    Announced,
    Answered,
    CancelWork,
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
    Stage,
    TimerFired,
    Work,
    WorkDone,
    WorkFailed,
    remind_within_s,
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
REMIND = Remind(PLAN.run_id)
SOON_S = 2 * limits.REMIND_BASE_S


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
    assert actions == (CancelWork(), Follow(()))
    assert (state.plan, state.stage) == (PLAN, Stage.IDLE)


NEWER = dataclasses.replace(PLAN, run=2)
SAT_OUT = Announced(announcement(2, assignment_of=(NO_ASSIGNMENT,)))


@pytest.mark.parametrize(
    ("events", "event"),
    [
        pytest.param((), Planned(PLAN), id="the same plan"),
        pytest.param((Planned(NEWER),), Planned(PLAN), id="an older plan"),
        pytest.param(WORKING, WorkDone(1, 2, b"\2" * 16, ID), id="work for another round"),
        pytest.param(WORKING, WorkDone(1, 1, b"x" * 16, ID), id="work for another nonce"),
        pytest.param(WORKING, WorkDone(2, 1, b"\1" * 16, ID), id="work for another run"),
        pytest.param((*WORKING, SAT_OUT), DONE, id="work that was cancelled"),
        pytest.param((*WORKING, WorkFailed(b"\1" * 16)), Announced(announcement()), id="a round that failed"),
        pytest.param((*WORKING, WorkFailed(b"\1" * 16)), WorkFailed(b"\1" * 16), id="a failure again"),
        pytest.param(SENDING, control(Action.ACK, transfer=bytes(16)), id="an answer to another upload"),
        pytest.param((), control(Action.ACK), id="an answer without an upload"),
        # There is nothing to remind of before the work is done.
        *(
            pytest.param(events, event, id=f"{type(event).__name__} after {len(events)} events")
            for events in ((), SENDING[:1], SENDING[:2], WORKING)
            for event in (TimerFired(), Reconnected())
        ),
    ],
)
def test_events_that_change_nothing(events, event):
    state, _ = after(*events)
    assert step(state, event) == (state, ())


def test_newer_plan_cancels_the_work():
    """A newer plan cancels the work in progress."""
    state, actions = after(*SENDING, Planned(NEWER))
    assert CancelWork() in actions
    assert (state.stage, state.announcement, state.models) == (Stage.IDLE, None, {})


def test_sitting_out_forgets_models():
    """The runtime drops models without a subscription, so the state must not count on them in the next round."""
    state, _ = after(*SENDING, control(Action.ACK))
    state, _ = step(state, Announced(announcement(2, assignment_of=(NO_ASSIGNMENT, NO_ASSIGNMENT))))
    assert state.models == {}
    state, _ = step(state, Announced(announcement(3)))
    state, actions = step(state, Located(b"\3" * 16, MEANS))
    assert (state.stage, actions) == (Stage.FETCHING, (Follow(("bb",)),))


KEPT = RoundState(0, ReplayWatermark(3, 1, 1, b"\1" * 16), transfer=ID, sent=(1, 1, b"\1" * 16))
OVER = {"stage": Stage.IDLE, "done": True}
SENT = {"stage": Stage.SENDING, "attempt": 0, "done": False}


@pytest.mark.parametrize(
    ("events", "given", "facts", "actions"),
    [
        pytest.param(WORKING, {}, {"stage": Stage.WORKING}, (Work(announcement(), TRAIN),), id="the last model"),
        pytest.param(
            (*WORKING[:2], ModelArrived("bb", b"\2" * 16)), {}, {"stage": Stage.FETCHING}, (), id="another version"
        ),
        pytest.param(WORKING[:1], {"index": 1}, OVER, (Follow(()),), id="no order: sits out"),
        pytest.param(SENDING, {}, {**SENT, "transfer": ID, "sent": (1, 1, b"\1" * 16)}, (Send(),), id="finished work"),
        pytest.param((*WORKING, WorkFailed(b"\1" * 16)), {}, OVER, (), id="failed work: sits out"),
        pytest.param((*SENDING, control(Action.ACK)), {}, OVER, (), id="taken"),
        pytest.param((*SENDING, control(Action.REFUSED)), {}, OVER, (), id="refused"),
        pytest.param(
            (*SENDING, TimerFired(), control(Action.NACK, missing=(1, 4))),
            {},
            SENT,
            (Send((1, 4)),),
            id="missing chunks",
        ),
        # The aggregator restarted: it may not have it.
        pytest.param((*SENDING, TimerFired(), WORKING[0]), {}, SENT, (REMIND,), id="the round again reminds"),
        pytest.param((*WORKING, WORKING[0]), {}, {"stage": Stage.WORKING}, (), id="the round again restarts no work"),
        pytest.param((*SENDING, control(Action.ACK), WORKING[0]), {}, OVER, (), id="an answered round again"),
        # Mark and transfer come from disk; the round is announced; nothing is computed.
        pytest.param((Planned(PLAN), WORKING[0]), {"state": KEPT}, SENT, (REMIND,), id="restart: the stored upload"),
    ],
)
def test_stage_and_actions_after(events, given, facts, actions):
    state, done = after(*events, **given)
    assert {name: getattr(state, name) for name in facts} == facts
    assert done == actions


@pytest.mark.parametrize(
    ("events", "state"),
    [((*WORKING, WorkFailed(b"\1" * 16)), None), ((Planned(PLAN),), KEPT)],
    ids=["failed", "restart"],
)
def test_new_round_is_worked_on(events, state):
    state, actions = after(*events, Announced(announcement(2)), state=state)
    assert state.stage is Stage.FETCHING
    assert not any(isinstance(a, Send | Remind) for a in actions)


def test_refused_uploads_residual_is_wasted():
    """The residual of a refused upload is wasted unless it is acknowledged later."""
    refused, _ = after(*SENDING, control(Action.REFUSED))
    assert refused.wasted == refused.transfer == ID
    again, _ = step(refused, Announced(announcement()))
    taken, _ = step(again, control(Action.ACK))
    assert taken.wasted == b""
    later, _ = step(refused, Announced(announcement(2)))
    assert later.wasted == ID


def test_refused_upload_is_offered_again():
    """The aggregator may have taken up a run that it did not serve; an upload that it has taken is not offered again."""
    state, _ = after(*SENDING, control(Action.REFUSED))
    state, actions = step(state, Announced(announcement()))
    assert (state.stage, state.done, actions) == (Stage.SENDING, False, (REMIND,))
    assert remind_within_s(state) == SOON_S
    state, _ = step(state, control(Action.ACK))
    assert step(state, Announced(announcement()))[1] == ()
    refused, _ = after(*SENDING, control(Action.REFUSED), Announced(announcement(2)))
    assert refused.stage is Stage.FETCHING
    assert not refused.refused


def test_reminders_back_off_to_the_cap():
    state, _ = after(*SENDING)
    bounds = []
    for _ in range(14):
        state, actions = step(state, TimerFired())
        assert actions == (REMIND,)
        bounds.append(remind_within_s(state))
    assert bounds == [4, 8] + [10] * 9 + [60] * 3
    state, actions = step(state, Reconnected())
    assert (actions, remind_within_s(state)) == ((dataclasses.replace(REMIND, reconnected=True),), SOON_S)


@pytest.mark.parametrize(("announced_s", "base_s"), [(20.0, 20.0), (0.0, 1.0), (-5.0, 1.0), (1e9, 600.0)])
def test_announced_pause_bounds_reminders(announced_s, base_s):
    """A large fleet's reminders would come while the aggregator still works on the uploads."""
    opening = Announced(dataclasses.replace(announcement(), remind_after_s=announced_s))
    state, actions = after(opening, *SENDING[1:])
    assert (actions, remind_within_s(state)) == ((Send(),), 2 * base_s)
    bounds = []
    for _ in range(14):
        state, _ = step(state, TimerFired())
        bounds.append(remind_within_s(state))
    assert min(bounds) >= 2 * base_s
    assert bounds[-1] == max(60.0, 2 * base_s)


def test_a_new_round_cancels_the_old_one():
    for events in (SENDING[:1], WORKING, SENDING):
        state, actions = after(*events, Announced(announcement(2)))
        assert actions[0] == CancelWork()
        assert state.mark.round == 2
        assert state.attempt == 0


def test_the_final_answer_ends_the_run():
    work = WorkDone(1, 6, b"\6" * 16, ID)
    state, actions = after(Announced(FINAL), Located(b"\6" * 16, {}), work, control(Action.ACK, round_=6))
    assert actions == (RunDone(PLAN),)
    assert step(state, Announced(FINAL))[1] == (), "and it ends once"


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


LAST = {"mark": ReplayWatermark(3, 1, 6, b"\6" * 16), "transfer": ID, "sent": (1, 6, b"\6" * 16)}


def test_final_answer_outlives_a_restart():
    """The announcement is retained for as long as no other run begins: nothing is sent, and the run is over."""
    state, _ = step(RoundState(0, **LAST, answered=True), Planned(PLAN))
    state, actions = step(state, Announced(FINAL))
    assert actions == (RunDone(PLAN),)
    assert (state.stage, state.done) == (Stage.IDLE, True)
    assert step(state, Announced(FINAL)) == (state, ())


@pytest.mark.parametrize("answered", [False, True])
def test_final_work_of_lost_model_is_redone(answered):
    """A final upload whose model is lost is worked for again."""
    state, _ = step(RoundState(0, **LAST, answered=answered), Planned(PLAN, lost=True))
    state, actions = step(state, Announced(FINAL))
    assert actions == (Locate(FINAL, REPORT),)
    state, actions = step(state, Located(b"\6" * 16, {}))
    assert actions == (Follow(()), Work(FINAL, REPORT))
    state, actions = step(state, WorkDone(1, 6, b"\6" * 16, ID))
    assert actions == (Send(),)
    assert not state.answered


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


def test_only_transfers_in_memory_count():
    """One that an earlier round used is gone from memory."""
    state, _ = after()
    for announced in (ROUNDS[0], ROUNDS[2]):
        state, _ = step(state, Announced(announced))
        state, actions = step(state, Located(state.mark.nonce, {"mean": ID}, ahead=("next",)))
        assert (state.stage, actions[0]) == (Stage.FETCHING, Follow(("mean", "next")))
        state, actions = step(state, ModelArrived("mean", ID))
        assert (state.stage, len(actions)) == (Stage.WORKING, 1)
    state, _ = step(after()[0], Announced(ROUNDS[0]))
    _, actions = step(state, Located(state.mark.nonce, {"mean": ID}, arrived={"mean": ID}))
    assert actions == (Follow(("mean",)), Work(ROUNDS[0], TRAIN))


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
    assert (state.stage, actions) == (Stage.IDLE, (CancelWork(), Follow(())))
    for event in (TimerFired(), Reconnected()):
        assert step(state, event) == (state, ())
