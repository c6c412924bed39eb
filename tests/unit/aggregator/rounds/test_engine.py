"""The aggregator's rules: when rounds open and close."""

import dataclasses

import numpy as np
import pytest

from aggregator.rounds.engine import (
    PRODUCTS_PER_UPDATE,
    CameOnline,
    DeadlinePassed,
    Left,
    OpenRound,
    WentOffline,
)
from shoal.protocol.messages import Phase, Share
from tests.helpers.engines import DEVICES, give, kinds, mean_of, online, opened
from tests.helpers.plans import engine_of, run_plan, stored, upload_of

# ---------------------------------------------------------------------------------------------------- rounds


def test_the_first_round_waits_for_everybody():
    engine = engine_of(run_plan())
    state, _ = engine.begin(DEVICES)
    state, actions = online(engine, state, *DEVICES[:4])
    assert actions == ()
    state, (open_,) = online(engine, state, DEVICES[4])
    assert isinstance(open_, OpenRound)
    assert set(open_.plan.assignments) == set(DEVICES)
    assert (state.round, state.waiting) == (1, DEVICES)


def test_after_the_deadline_the_first_round_opens_with_whoever_is_there():
    engine = engine_of(run_plan())
    state, _ = engine.begin(DEVICES)
    state, _ = online(engine, state, "dev-2", "dev-4")
    state, (open_,) = engine.handle(state, DeadlinePassed(0))
    assert set(open_.plan.assignments) == {"dev-2", "dev-4"}


def test_the_deadline_alone_opens_nothing_without_enough_devices():
    """A mean of fewer than min_contributors could not be used: it waits on, and opens as soon as there are enough."""
    engine = engine_of(run_plan(min_contributors=3))
    state, _ = engine.begin(DEVICES)
    state, actions = engine.handle(state, DeadlinePassed(0))
    assert actions == ()
    state, actions = online(engine, state, "dev-1", "dev-2")
    assert actions == ()
    state, actions = online(engine, state, "dev-3")
    assert kinds(actions) == ["OpenRound"]


def test_a_device_that_left_before_the_start_is_waited_for_again():
    engine = engine_of(run_plan())
    state, _ = engine.begin(("dev-1", "dev-2"))
    state, _ = online(engine, state, "dev-1")
    state, _ = engine.handle(state, WentOffline("dev-1"))
    state, actions = online(engine, state, "dev-2")
    assert actions == ()
    _, actions = online(engine, state, "dev-1")
    assert kinds(actions) == ["OpenRound"]


def test_a_round_closes_when_everybody_has_answered():
    engine, state = opened()
    state, actions = give(engine, state, *DEVICES[:4])
    assert actions == ()
    state, actions = give(engine, state, DEVICES[4])
    assert kinds(actions) == ["RoundClosed", "OpenRound"]
    record = actions[0].record
    assert (record.round, record.ordered, record.contributed, record.missing) == (1, 5, 5, ())
    assert state.round == 2


def test_the_deadline_closes_a_round_on_its_quorum():
    """Quorum 0.6 of five is three: two and the deadline wait on, the third closes at once."""
    engine, state = opened()
    state, _ = give(engine, state, "dev-1", "dev-2")
    state, actions = engine.handle(state, DeadlinePassed(1))
    assert actions == ()
    state, (closed, open_) = give(engine, state, "dev-5")
    assert closed.record.missing == ("dev-3", "dev-4")
    assert isinstance(open_, OpenRound)


def test_a_quorum_that_is_there_at_the_deadline_closes_then():
    engine, state = opened()
    state, actions = give(engine, state, "dev-1", "dev-2", "dev-3")
    assert actions == ()
    _, (closed, _) = engine.handle(state, DeadlinePassed(1))
    assert closed.record.contributed == 3


def test_a_deadline_of_another_round_means_nothing():
    engine, state = opened()
    state, _ = give(engine, state, *DEVICES)
    assert state.round == 2
    state, actions = engine.handle(state, DeadlinePassed(1))
    assert actions == ()
    assert not state.deadline_passed


def test_the_deadline_is_reset_by_the_next_round():
    engine, state = opened()
    state, _ = engine.handle(state, DeadlinePassed(1))
    assert state.deadline_passed
    state, _ = give(engine, state, "dev-1", "dev-2", "dev-3")
    assert state.round == 2
    assert not state.deadline_passed


def test_nobody_waits_for_a_device_that_is_gone():
    engine, state = opened()
    state, _ = give(engine, state, "dev-1", "dev-2", "dev-3")
    state, actions = engine.handle(state, WentOffline("dev-4"))
    assert actions == ()
    _, (closed, _) = engine.handle(state, WentOffline("dev-5"))
    assert closed.record.missing == ("dev-4", "dev-5")


def test_a_device_that_came_back_is_waited_for_again():
    engine, state = opened()
    state, _ = engine.handle(state, WentOffline("dev-5"))
    state, _ = engine.handle(state, CameOnline("dev-5"))
    state, actions = give(engine, state, "dev-1", "dev-2", "dev-3", "dev-4")
    assert actions == ()
    assert state.waiting == ("dev-5",)


def test_gone_devices_do_not_lower_the_quorum():
    engine, state = opened()
    for device in DEVICES[1:]:
        state, _ = engine.handle(state, WentOffline(device))
    state, actions = give(engine, state, "dev-1")
    assert actions == ()
    _, actions = engine.handle(state, DeadlinePassed(1))
    assert actions == ()


def test_a_revoked_device_is_neither_waited_for_nor_counted():
    """The open round closes on the quorum of those who are left, the next one opens without it and asks it for nothing."""
    engine, state = opened(quorum=1.0)
    state, actions = give(engine, state, *DEVICES[:4])
    assert actions == ()
    state, actions = engine.handle(state, Left("dev-5"))
    assert kinds(actions) == ["RoundClosed", "OpenRound"]
    assert set(state.plan.assignments) == set(state.devices) == set(DEVICES[:4])
    assert engine.handle(state, Left("dev-5")) == (state, ())


def test_a_revoked_device_that_had_answered_still_counts_in_its_round():
    """Its upload was durable before."""
    engine, state = opened(quorum=1.0)
    state, _ = give(engine, state, "dev-5")
    state, _ = engine.handle(state, Left("dev-5"))
    state, actions = give(engine, state, *DEVICES[:4])
    assert kinds(actions) == ["RoundClosed", "OpenRound"]
    assert actions[0].record.contributed == 5
    assert set(state.plan.assignments) == set(DEVICES[:4])


def test_an_answer_of_a_gone_device_still_counts():
    engine, state = opened()
    state, _ = engine.handle(state, WentOffline("dev-5"))
    state, actions = give(engine, state, "dev-5", *DEVICES[:3])
    assert actions == ()
    _, (closed, _) = give(engine, state, "dev-4")
    assert closed.record.contributed == 5


def offline(engine, state, *devices):
    for device in devices:
        state, actions = engine.handle(state, WentOffline(device))
        assert actions == ()
    return state


def test_later_rounds_open_with_the_quorums_share_of_the_fleet():
    """Quorum 0.6 of five is three: they need not wait for the other two."""
    engine, state = opened()
    state = offline(engine, state, "dev-4", "dev-5")
    _, (_, open_) = give(engine, state, *DEVICES[:3])
    assert (open_.plan.round, set(open_.plan.assignments)) == (2, set(DEVICES[:3]))


def gathering():
    """Return (engine, state) after round 1 of five, with nobody there."""
    engine, state = opened()
    state = offline(engine, state, *DEVICES)
    state, actions = give(engine, state, *DEVICES[:3])
    assert kinds(actions) == ["RoundClosed", "Gather"]
    assert state.plan is None
    return engine, state


def test_with_nobody_there_it_gathers_until_the_quorums_share_has_come():
    """A restarted broker must not have one device train alone while the others reconnect."""
    engine, state = gathering()
    state, actions = online(engine, state, "dev-2", "dev-4")
    assert (actions, state.plan) == ((), None)
    _, (open_,) = online(engine, state, "dev-5")
    assert (open_.plan.round, set(open_.plan.assignments)) == (2, {"dev-2", "dev-4", "dev-5"})


def test_after_the_deadline_a_later_round_opens_with_whoever_is_there():
    """`Gather` asks for the deadline of the round that has closed: the run goes on with min_contributors devices."""
    engine, state = gathering()
    state, actions = online(engine, state, "dev-2")
    assert actions == ()
    _, (open_,) = engine.handle(state, DeadlinePassed(1))
    assert (open_.plan.round, set(open_.plan.assignments)) == (2, {"dev-2"})


def test_the_deadline_of_the_gathering_may_pass_before_anybody_comes():
    engine, state = gathering()
    state, actions = engine.handle(state, DeadlinePassed(1))
    assert actions == ()
    state, (open_,) = online(engine, state, "dev-2")
    assert (open_.plan.round, set(open_.plan.assignments)) == (2, {"dev-2"})
    assert not state.deadline_passed


def test_a_new_device_takes_part_once_others_have_sealed_the_model_for_it():
    engine, state = opened(devices=("dev-1", "dev-2"))
    state, _ = online(engine, state, "dev-9")
    assert "dev-9" not in state.plan.assignments
    state, (_, open_) = give(engine, state, "dev-1", "dev-2")
    assert set(open_.plan.assignments) == {"dev-1", "dev-2"}
    assert [a.seal for a in open_.plan.assignments.values() if a.seal] == [(0,)]
    _, (_, open_) = give(engine, state, "dev-1", "dev-2")
    assert set(open_.plan.assignments) == {"dev-1", "dev-2", "dev-9"}


def test_the_final_round_asks_everybody_to_report_and_ends_the_run():
    engine, state = opened(devices=("dev-1", "dev-2"), rounds=1)
    state, (_, open_) = give(engine, state, "dev-1", "dev-2")
    assert open_.plan.final
    assignment = open_.plan.assignments["dev-1"]
    assert (assignment.train, assignment.evaluate, assignment.phase, assignment.share) == (
        False,
        True,
        Phase.SCORE,
        Share.TRAIN,
    )
    state, actions = give(engine, state, "dev-1", "dev-2", samples=5)
    assert kinds(actions) == ["RoundClosed", "RunFinished"]
    record = actions[0].record
    assert (record.final, record.correct, record.tested) == (True, 6, 8)
    assert record.device_accuracy == {"dev-1": (3, 4), "dev-2": (3, 4)}
    assert state.finished
    assert engine.handle(state, CameOnline("dev-7")) == (state, ())


def test_a_record_weights_the_loss_by_samples():
    engine, state = opened(devices=("dev-1", "dev-2"))
    state, _ = give(engine, state, "dev-1", loss=1.0, samples=30)
    _, (closed, _) = give(engine, state, "dev-2", loss=3.0, samples=10)
    assert closed.record.loss == pytest.approx(1.5)
    assert closed.record.norms == pytest.approx({"dev-1": np.sqrt(6), "dev-2": np.sqrt(6)})


def test_the_same_transitions_give_the_same_state():
    """Pure: neither the engine nor an earlier state remembers anything."""
    engine, state = opened()
    before = dataclasses.replace(state)
    first = give(engine, state, *DEVICES)
    assert state == before
    again = give(engine, state, *DEVICES)
    assert first[1][0].record == again[1][0].record
    assert mean_of(first[0]).tobytes() == mean_of(again[0]).tobytes()


def test_uploads_may_arrive_in_any_order():
    """Sums run in device order: not a bit of the mean depends on who was first."""
    rng = np.random.default_rng(0)
    vectors = {d: rng.standard_normal(6) for d in DEVICES}
    means = set()
    for assignment in (DEVICES, DEVICES[::-1], ("dev-3", "dev-1", "dev-5", "dev-2", "dev-4")):
        engine, state = opened()
        for device in assignment:
            state, _ = give(engine, state, device, values=vectors[device])
        means.add(mean_of(state).tobytes())
    assert len(means) == 1


@pytest.mark.parametrize(("participation", "expected"), [(0.4, 2), (0.5, 2), (0.1, 1), (1.0, 5)])
def test_partial_participation_draws_a_share_of_those_present(participation, expected):
    _, state = opened(participation=participation)
    assert len(state.plan.assignments) == expected


def test_participation_varies_by_round_and_not_by_run():
    draws = []
    for _ in range(2):
        engine, state = opened(participation=0.4)
        draws.append([])
        for _ in range(6):
            draws[-1].append(tuple(state.plan.assignments))
            state, _ = give(engine, state, *state.plan.assignments)
    assert draws[0] == draws[1]
    assert len(set(draws[0])) > 1


def test_resume_opens_the_same_round_again():
    """What `OpenRound` had made durable suffices: the same plan and nonce follow."""
    engine, state = opened(participation=0.6)
    state, actions = give(engine, state, *state.plan.assignments)
    (first,) = [a for a in actions if isinstance(a, OpenRound)]
    assert len(first.plan.assignments) == 3
    state, (again,) = engine.resume(DEVICES, first.before, first.held, 2, first.available)
    assert isinstance(again, OpenRound)
    assert (again.plan, again.nonce) == (first.plan, engine.nonce(2))
    assert not state.unavailable


def test_nonces_depend_on_round_and_seed():
    run = run_plan()
    nonces = [engine_of(run, seed).nonce(r) for seed in (bytes(16), b"s" * 16) for r in (1, 2)]
    assert len(set(nonces)) == 4
    assert all(len(n) == 16 for n in nonces)


# ----------------------------------------------------------------------------------------- the steps of a transition


def durable(engine, state, device):
    """Return the event of a durable upload."""
    upload, body = upload_of(engine, state, device)
    return stored(upload, body)


def test_uploads_that_became_durable_together_count_in_one_round():
    """After the deadline the first of them already makes the quorum; the others must not fall into the next round."""
    engine, state = opened(quorum=0.6)
    state, _ = give(engine, state, *DEVICES[:2])
    state, actions = engine.handle(state, DeadlinePassed(1))
    assert not actions
    recorded = engine.record(state, [durable(engine, state, device) for device in DEVICES[2:]])
    assert recorded.plan is state.plan
    after, actions = engine.advance(state, recorded)
    assert kinds(actions) == ["RoundClosed", "OpenRound"]
    assert actions[0].record.contributed == len(DEVICES)
    assert (after.round, len(after.received)) == (2, 0)


def test_the_two_steps_of_a_transition_give_what_handle_gives():
    engine, state = opened(quorum=1.0)
    for device in DEVICES:
        event = durable(engine, state, device)
        whole = engine.handle(state, event)
        assert engine.advance(state, engine.record(state, (event,)))[0].resume_metadata == whole[0].resume_metadata
        assert kinds(engine.advance(state, engine.record(state, (event,)))[1]) == kinds(whole[1])
        state = whole[0]
    assert state.round == 2


def test_only_a_closing_round_is_work():
    engine, state = opened(quorum=1.0)
    assert engine.closing_work(state) == 0
    for device in DEVICES[:-1]:
        state, _ = give(engine, state, device)
        assert engine.closing_work(state) == 0
    recorded = engine.record(state, (durable(engine, state, DEVICES[-1]),))
    assert engine.closing_work(recorded) == 5 * (6 * engine.run.length + PRODUCTS_PER_UPDATE)
    finished = dataclasses.replace(recorded, finished=True)
    assert engine.closing_work(finished) == 0
    assert engine.advance(finished, engine.record(finished, (DeadlinePassed(1),))) == (finished, ())
