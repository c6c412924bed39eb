"""The device's state machine: the transition for each event, stage by stage."""

import dataclasses

import pytest

from crypto.seal.replay import ReplayWatermark
from edge_client.protocol.round_state import (
    TRANSITIONS,
    AgentState,
    Announced,
    Answered,
    CancelWork,
    ClearTimer,
    Follow,
    Locate,
    Located,
    ModelArrived,
    Planned,
    Reconnected,
    Remind,
    RunDone,
    Send,
    SetTimer,
    Stage,
    TimerFired,
    Work,
    WorkDone,
    WorkFailed,
    diagram,
    step,
)
from shoal import limits
from shoal.errors import UntrustedError
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import (
    NO_ASSIGNMENT,
    SHARED_MODEL,
    Action,
    Announcement,
    Assignment,
    Control,
    ModelRef,
    Phase,
    Share,
)
from shoal.protocol.states import Offer, RoundModels, StateId
from tests.helpers.plans import run_plan

PLAN = run_plan(max_models=3, origins=2, rounds=5)
TRAIN = Assignment(int(Phase.TRAIN), (0, 1), int(Share.TRAIN), train=True, evaluate=False, margins=False)
REPORT = Assignment(int(Phase.SCORE), (0,), int(Share.TRAIN), train=False, evaluate=True, margins=False)
ORIGIN = ModelRef(model=0, origin=0, label="aa", transfer=bytes(16), contributors=0, norm=0.0)
OFFSET = ModelRef(model=1, origin=1, label="bb", transfer=b"\1" * 16, contributors=3, norm=1.0)
ID = b"transfer-of-mine"
REMIND = Remind(ID, PLAN.run_id)


def announcement(round_=1, **changes):
    fields = {
        "fleet": "demo",
        "run": 1,
        "run_id": PLAN.run_id,
        "epoch": 1,
        "key_id": PLAN.key_id,
        "roster_sequence": 3,
        "round": round_,
        "nonce": bytes([round_]) * 16,
        "deadline_s": 60.0,
        "finished": round_ > PLAN.rounds,
        "models": (ORIGIN, OFFSET),
        "assignments": (TRAIN,),
        "assignment_of": (0, NO_ASSIGNMENT),
        "mode": PLAN.mode,
    }
    return Announcement(**{**fields, **changes})


FINAL = announcement(6, assignments=(REPORT,), models=(ORIGIN,))


def after(*events, index=0, state=None):
    """Return the state and the last event's actions, from a device that follows the plan."""
    actions = ()
    state = state or step(AgentState(index), Planned(PLAN))[0]
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


ARRIVED = ModelArrived("bb", b"\1" * 16)
DONE = WorkDone(1, 1, b"\1" * 16, ID)
SENDING = (Announced(announcement()), ARRIVED, DONE)


def test_a_plan_starts_from_nothing():
    state, actions = step(AgentState(0), Planned(PLAN))
    assert actions == (CancelWork(), ClearTimer(), Follow(()))
    assert (state.plan, state.stage) == (PLAN, Stage.IDLE)
    assert step(state, Planned(PLAN)) == (state, ())


def test_an_older_plan_is_not_taken_up():
    newer = dataclasses.replace(PLAN, run=2)
    state, _ = step(AgentState(0), Planned(newer))
    assert step(state, Planned(PLAN)) == (state, ())


def test_a_newer_plan_cancels_the_work_in_progress():
    state, actions = after(*SENDING, Planned(dataclasses.replace(PLAN, run=2)))
    assert CancelWork() in actions
    assert (state.stage, state.announcement, state.models) == (Stage.IDLE, None, {})


def test_an_order_fetches_the_models_that_have_moved():
    """The device has the origin; it fetches only the model with an offset."""
    state, actions = after(Announced(announcement()))
    assert state.stage is Stage.FETCHING
    assert actions == (Follow(("bb",)),)


def test_a_device_that_sits_out_forgets_the_models_that_it_no_longer_receives():
    """The runtime drops models without a subscription, so the state must not count on them in the next round."""
    state, _ = after(*SENDING, control(Action.ACK))
    state, _ = step(state, Announced(announcement(2, assignment_of=(NO_ASSIGNMENT, NO_ASSIGNMENT))))
    state, actions = step(state, Announced(announcement(3)))
    assert (state.stage, actions) == (Stage.FETCHING, (Follow(("bb",)),))


def test_only_candidates_are_fetched():
    """A device that is asked about one of two moved models receives that one alone."""
    moved = dataclasses.replace(ORIGIN, transfer=b"\2" * 16, contributors=3)
    assignment = dataclasses.replace(TRAIN, candidates=(1,))
    _, actions = after(Announced(announcement(models=(moved, OFFSET), assignments=(assignment,))))
    assert actions == (Follow(("bb",)),)


def test_the_shared_part_is_fetched_with_every_candidate():
    """With weight sharing a model is at hand when its own part and the shared one are."""
    shared = ModelRef(model=SHARED_MODEL, origin=0, label="ss", transfer=b"\3" * 16, contributors=3, norm=1.0)
    plan = dataclasses.replace(PLAN, segments=(SegmentSpec("shared", 4), SegmentSpec("cluster", 2)))
    state, _ = step(AgentState(0), Planned(plan))
    state, actions = after(Announced(announcement(shared=shared)), state=state)
    assert actions == (Follow(("bb", "ss")),)
    state, actions = after(ARRIVED, state=state)
    assert (state.stage, actions) == (Stage.FETCHING, ())
    state, actions = after(ModelArrived("ss", b"\3" * 16), state=state)
    assert (state.stage, len(actions)) == (Stage.WORKING, 1)


def test_work_begins_when_the_last_model_is_there():
    state, actions = after(Announced(announcement()), ARRIVED)
    assert state.stage is Stage.WORKING
    assert actions == (Work(announcement(), TRAIN),)


def test_another_version_of_a_model_does_not_do():
    state, actions = after(Announced(announcement()), ModelArrived("bb", b"\2" * 16))
    assert (state.stage, actions) == (Stage.FETCHING, ())


def test_models_from_the_origin_alone_need_no_fetching():
    state, actions = after(Announced(announcement(models=(ORIGIN, dataclasses.replace(OFFSET, transfer=bytes(16))))))
    assert state.stage is Stage.WORKING
    assert [type(a) for a in actions] == [Follow, Work]


def test_a_model_that_did_not_change_is_used_again():
    state, _ = after(*SENDING, control(Action.ACK))
    state, actions = after(Announced(announcement(2)), state=state)
    assert state.stage is Stage.WORKING
    assert actions == (Follow(("bb",)), Work(announcement(2), TRAIN))


def test_a_device_without_an_order_sits_out():
    state, actions = after(Announced(announcement()), index=1)
    assert (state.stage, state.done, actions) == (Stage.IDLE, True, (Follow(()),))


def test_finished_work_is_sent_and_a_timer_set():
    state, actions = after(*SENDING)
    assert state.stage is Stage.SENDING
    assert actions == (Send(ID), SetTimer(2 * limits.REMIND_BASE_S))
    assert state.sent == (1, 1, b"\1" * 16)


@pytest.mark.parametrize(
    "late", [WorkDone(1, 2, b"\2" * 16, ID), WorkDone(1, 1, b"x" * 16, ID), WorkDone(2, 1, b"\1" * 16, ID)]
)
def test_work_for_another_round_is_dropped(late):
    state, _ = after(*SENDING[:2])
    assert step(state, late) == (state, ())


def test_work_that_ends_after_it_was_cancelled_is_dropped():
    state, _ = after(*SENDING[:2], Announced(announcement(2, assignment_of=(NO_ASSIGNMENT,))))
    assert step(state, DONE) == (state, ())


def test_failed_work_sits_the_round_out():
    state, actions = after(*SENDING[:2], WorkFailed(b"\1" * 16))
    assert (state.stage, state.done, actions) == (Stage.IDLE, True, ())
    assert step(state, Announced(announcement()))[1] == (), "the same round again is not tried again"
    assert step(state, Announced(announcement(2)))[0].stage is Stage.WORKING
    assert step(state, WorkFailed(b"\1" * 16)) == (state, ())


@pytest.mark.parametrize("action", [Action.ACK, Action.REFUSED])
def test_an_answer_ends_the_sending(action):
    state, actions = after(*SENDING, control(action))
    assert (state.stage, state.done, actions) == (Stage.IDLE, True, (ClearTimer(),))


def test_a_refused_upload_is_offered_again_once_the_round_is_announced_again():
    """The aggregator may have taken up a run that it did not serve; an upload that it has taken is not offered again."""
    state, _ = after(*SENDING, control(Action.REFUSED))
    state, actions = step(state, Announced(announcement()))
    assert (state.stage, state.done, actions) == (Stage.SENDING, False, (REMIND, SetTimer(2 * limits.REMIND_BASE_S)))
    state, _ = step(state, control(Action.ACK))
    assert step(state, Announced(announcement()))[1] == ()
    refused, _ = after(*SENDING, control(Action.REFUSED), Announced(announcement(2)))
    assert refused.stage is Stage.WORKING
    assert not refused.refused


def test_an_answer_to_another_upload_means_nothing():
    state, _ = after(*SENDING)
    assert step(state, control(Action.ACK, transfer=bytes(16))) == (state, ())
    idle, _ = after()
    assert step(idle, control(Action.ACK)) == (idle, ())


def test_only_missing_chunks_are_sent():
    state, actions = after(*SENDING, TimerFired(), control(Action.NACK, missing=(1, 4)))
    assert (state.stage, state.attempt) == (Stage.SENDING, 0)
    assert actions == (Send(ID, (1, 4)), SetTimer(2 * limits.REMIND_BASE_S))


def test_reminders_back_off_to_the_cap():
    state, _ = after(*SENDING)
    bounds = []
    for _ in range(14):
        state, (remind, timer) = step(state, TimerFired())
        assert remind == REMIND
        bounds.append(timer.within_s)
    assert bounds == [4, 8] + [10] * 9 + [60] * 3
    again = dataclasses.replace(REMIND, reconnected=True)
    assert step(state, Reconnected())[1] == (again, SetTimer(2 * limits.REMIND_BASE_S))


@pytest.mark.parametrize(("announced_s", "base_s"), [(20.0, 20.0), (0.0, 1.0), (-5.0, 1.0), (1e9, 600.0)])
def test_the_announced_pause_bounds_the_first_reminder(announced_s, base_s):
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


@pytest.mark.parametrize("event", [TimerFired(), Reconnected()])
def test_there_is_nothing_to_remind_of_before_the_work_is_done(event):
    for events in ((), SENDING[:1], SENDING[:2]):
        state, _ = after(*events)
        assert step(state, event) == (state, ())


def test_the_same_round_announced_again_causes_a_reminder_of_the_upload():
    """The aggregator restarted: it may not have it."""
    state, actions = after(*SENDING, TimerFired(), Announced(announcement()))
    assert actions == (REMIND, SetTimer(2 * limits.REMIND_BASE_S))
    assert state.attempt == 0


def test_the_same_round_announced_again_does_not_restart_the_work():
    state, actions = after(*SENDING[:2], Announced(announcement()))
    assert (state.stage, actions) == (Stage.WORKING, ())


def test_an_answered_round_announced_again_is_over():
    state, actions = after(*SENDING, control(Action.ACK), Announced(announcement()))
    assert (state.stage, actions) == (Stage.IDLE, ())


def test_a_new_round_cancels_the_old_one():
    for events in (SENDING[:1], SENDING[:2], SENDING):
        state, actions = after(*events, Announced(announcement(2)))
        assert actions[:2] == (CancelWork(), ClearTimer())
        assert state.mark.round == 2
        assert state.attempt == 0


def test_after_a_restart_the_aggregator_is_reminded_of_the_stored_upload_of_the_same_round():
    """Mark and transfer come from disk; the round is announced; nothing is computed."""
    kept = AgentState(0, ReplayWatermark(3, 1, 1, b"\1" * 16), transfer=ID, sent=(1, 1, b"\1" * 16))
    state, actions = after(Planned(PLAN), Announced(announcement()), state=kept)
    assert state.stage is Stage.SENDING
    assert actions == (REMIND, SetTimer(2 * limits.REMIND_BASE_S))


def test_after_a_restart_a_new_round_is_worked_on():
    kept = AgentState(0, ReplayWatermark(3, 1, 1, b"\1" * 16), transfer=ID, sent=(1, 1, b"\1" * 16))
    state, actions = after(Planned(PLAN), Announced(announcement(2)), state=kept)
    assert state.stage is Stage.FETCHING
    assert not any(isinstance(a, Send | Remind) for a in actions)


def test_the_final_answer_ends_the_run():
    work = WorkDone(1, 6, b"\6" * 16, ID)
    state, actions = after(Announced(FINAL), work, control(Action.ACK, round_=6))
    assert actions == (ClearTimer(), RunDone(PLAN))
    assert step(state, Announced(FINAL))[1] == (), "and it ends once"


@pytest.mark.parametrize(
    "bad",
    [
        announcement(run_id=bytes(16)),
        announcement(7),
        announcement(models=(dataclasses.replace(OFFSET, origin=2),)),
        announcement(models=(ORIGIN,)),
        announcement(roster_sequence=2),
        announcement(2, nonce=b"\1" * 16, round=1, finished=True),
    ],
)
def test_an_announcement_beyond_the_plan_changes_nothing(bad):
    state, _ = after(Announced(announcement()))
    with pytest.raises(UntrustedError):
        step(state, Announced(bad))
    assert after(ARRIVED, state=state)[0].stage is Stage.WORKING


def test_an_answer_of_the_final_round_outlives_a_restart():
    """The announcement is retained for as long as no other run begins: nothing is sent, and the run is over."""
    sent = (1, 6, b"\6" * 16)
    mark = ReplayWatermark(3, 1, 6, b"\6" * 16)
    state, _ = step(AgentState(0, mark, transfer=ID, sent=sent, answered=True), Planned(PLAN))
    state, actions = step(state, Announced(FINAL))
    assert actions == (RunDone(PLAN),)
    assert (state.stage, state.done) == (Stage.IDLE, True)
    assert step(state, Announced(FINAL)) == (state, ())


def test_a_final_upload_whose_model_is_lost_is_worked_for_again():
    sent = (1, 6, b"\6" * 16)
    mark = ReplayWatermark(3, 1, 6, b"\6" * 16)
    for answered in (False, True):
        before = AgentState(0, mark, transfer=ID, sent=sent, answered=answered)
        state, _ = step(before, Planned(PLAN, lost=True))
        state, actions = step(state, Announced(FINAL))
        assert actions == (Follow(()), Work(FINAL, REPORT))
        state, actions = step(state, WorkDone(1, 6, b"\6" * 16, ID))
        assert actions[0] == Send(ID)
        assert not state.answered


OTHER = ModelRef(model=2, origin=1, label="cc", transfer=b"\2" * 16, contributors=3, norm=1.0)
SITS_OUT = (NO_ASSIGNMENT, NO_ASSIGNMENT)
ROUNDS = (
    announcement(),
    announcement(assignment_of=SITS_OUT),
    announcement(2),
    announcement(2, assignment_of=SITS_OUT),
    announcement(3, models=(OFFSET, OTHER), assignments=(dataclasses.replace(TRAIN, candidates=(1, 2)),)),
    FINAL,
)


ROUND_KEYS = dataclasses.replace(PLAN, keys="round")
MODELS = RoundModels(key_version=3, offers=(Offer(0, StateId(0, 0)), Offer(1, StateId(1, 0))))
HELD_ROUNDS = tuple(
    announcement(round_, models=(), held=MODELS, assignment_of=places)
    for round_ in (1, 2)
    for places in ((0, NO_ASSIGNMENT), SITS_OUT)
)
RUNS = ((PLAN, ROUNDS), (ROUND_KEYS, HELD_ROUNDS))


def events_in(state, plan, rounds):
    """Return every event of a small run that the state may get next; work and answers are those of its own round."""
    mark = state.mark
    own = mark.nonce.ljust(16, b"\0")
    answers = [control(action, transfer=own, round_=mark.round) for action in (Action.ACK, Action.REFUSED, Action.NACK)]
    work = [WorkDone(mark.run, mark.round, own, own), WorkFailed(own)]
    models = [ModelArrived(ref.label, ref.transfer) for ref in (OFFSET, OTHER)]
    located = [Located(own, {}), Located(own, {OFFSET.label: OFFSET.transfer})] if plan.keys == "round" else []
    plans = [Planned(plan), Planned(dataclasses.replace(plan, run=2))]
    return [*map(Announced, rounds), *models, *located, *work, *answers, *plans, TimerFired(), Reconnected()]


def changes_of_stage(plan, rounds):
    """Return every (before, after, event type) with another stage after the event, over all states that can be reached."""
    found, seen = set(), set()
    waiting = [step(AgentState(0), Planned(plan))[0]]
    while waiting:
        state = waiting.pop()
        # The count of reminders only sets the timer; without a bound the search would have no end.
        state = dataclasses.replace(state, attempt=min(state.attempt, 1))
        if repr(state) in seen:
            continue
        seen.add(repr(state))
        restarted = AgentState(0, state.mark, transfer=state.transfer, sent=state.sent, answered=state.answered)
        waiting.append(step(restarted, Planned(plan))[0])
        for event in events_in(state, plan, rounds):
            try:
                after, _ = step(state, event)
            except UntrustedError:
                continue
            waiting.append(after)
            if after.stage is not state.stage:
                found.add((state.stage, after.stage, type(event)))
    return found


def test_exactly_the_listed_changes_of_stage_happen():
    """The search covers every order of the events, with restarts between them."""
    found = set().union(*(changes_of_stage(*run) for run in RUNS))
    assert found == {(*change, event) for change, causes in TRANSITIONS.items() for event in causes}


def test_a_round_of_held_models_waits_until_its_transfers_are_located_and_have_arrived():
    state, _ = step(AgentState(0), Planned(ROUND_KEYS))
    state, actions = step(state, Announced(HELD_ROUNDS[0]))
    assert (state.stage, actions) == (Stage.FETCHING, (Locate(HELD_ROUNDS[0], TRAIN),))
    nonce = state.mark.nonce
    assert step(state, Located(b"another round's.", {})) == (state, ())
    assert step(state, Located(nonce, {}))[1] == (Follow(()), Work(HELD_ROUNDS[0], TRAIN))
    state, actions = step(state, Located(nonce, {"mean": ID}))
    assert (state.stage, actions) == (Stage.FETCHING, (Follow(("mean",)),))
    assert step(state, ModelArrived("mean", b"an earlier mean's"))[0].stage is Stage.FETCHING
    assert step(state, ModelArrived("mean", ID))[1] == (Work(HELD_ROUNDS[0], TRAIN),)


def test_only_transfers_that_are_here_count_when_a_round_of_held_models_is_located_again():
    """One that an earlier round used is gone from memory."""
    state, _ = step(AgentState(0), Planned(ROUND_KEYS))
    for announced in (HELD_ROUNDS[0], HELD_ROUNDS[2]):
        state, _ = step(state, Announced(announced))
        state, actions = step(state, Located(state.mark.nonce, {"mean": ID}, ahead=("next",)))
        assert (state.stage, actions[0]) == (Stage.FETCHING, Follow(("mean", "next")))
        state, actions = step(state, ModelArrived("mean", ID))
        assert (state.stage, len(actions)) == (Stage.WORKING, 1)
    state, _ = step(step(AgentState(0), Planned(ROUND_KEYS))[0], Announced(HELD_ROUNDS[0]))
    _, actions = step(state, Located(state.mark.nonce, {"mean": ID}, arrived={"mean": ID}))
    assert actions == (Follow(("mean",)), Work(HELD_ROUNDS[0], TRAIN))


def test_a_round_whose_states_are_out_of_reach_is_skipped():
    state, _ = step(AgentState(0), Planned(ROUND_KEYS))
    state, _ = step(state, Announced(HELD_ROUNDS[0]))
    state, actions = step(state, WorkFailed(state.mark.nonce))
    assert (state.stage, state.done, actions) == (Stage.IDLE, True, ())


def test_the_diagram_shows_every_change_of_stage():
    lines = diagram().splitlines()
    assert len(lines) == 2 + len(TRANSITIONS)
    assert "    working --> sending: upload stored" in lines
