"""The aggregator's rules: when rounds open and close.

A fleet of thousands: nothing that happens once for each device walks over all devices.
"""

import dataclasses

import numpy as np

from aggregator.rounds.engine import (
    PRODUCTS_PER_UPDATE,
    CameOnline,
    DeadlinePassed,
    Left,
    OpenRound,
    WentOffline,
)
from shoal.protocol.messages import Phase, Share
from tests.helpers.engines import DEVICES, answered, give, kinds, mean_of, online, opened
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


def test_first_round_opens_after_deadline():
    """After the deadline the first round opens with whoever is there."""
    engine = engine_of(run_plan())
    state, _ = engine.begin(DEVICES)
    state, _ = online(engine, state, "dev-2", "dev-4")
    state, (open_,) = engine.handle(state, DeadlinePassed(0))
    assert set(open_.plan.assignments) == {"dev-2", "dev-4"}


def test_deadline_opens_nothing_for_too_few():
    """A mean of fewer than min_contributors could not be used: it waits on, and opens as soon as there are enough."""
    engine = engine_of(run_plan(min_contributors=3))
    state, _ = engine.begin(DEVICES)
    state, actions = engine.handle(state, DeadlinePassed(0))
    assert actions == ()
    state, actions = online(engine, state, "dev-1", "dev-2")
    assert actions == ()
    state, actions = online(engine, state, "dev-3")
    assert kinds(actions) == ["OpenRound"]


def test_closes_when_all_have_answered():
    """A round closes when everybody has answered."""
    engine, state = opened()
    state, actions = give(engine, state, *DEVICES[:4])
    assert actions == ()
    state, actions = give(engine, state, DEVICES[4])
    assert kinds(actions) == ["RoundClosed", "OpenRound"]
    record = actions[0].record
    assert (record.round, record.ordered, record.contributed, record.missing) == (1, 5, 5, ())
    assert state.round == 2


def test_deadline_closes_round_on_its_quorum():
    """Quorum 0.6 of five is three: two and the deadline wait on, the third closes at once."""
    engine, state = answered("dev-1", "dev-2")
    state, actions = engine.handle(state, DeadlinePassed(1))
    assert actions == ()
    state, (closed, open_) = give(engine, state, "dev-5")
    assert closed.record.missing == ("dev-3", "dev-4")
    assert isinstance(open_, OpenRound)
    assert not state.deadline_passed, "the next round has its own"


def test_deadline_of_another_round():
    """A deadline of another round means nothing."""
    engine, state = answered(*DEVICES)
    assert state.round == 2
    state, actions = engine.handle(state, DeadlinePassed(1))
    assert actions == ()
    assert not state.deadline_passed


def test_gone_device_is_not_waited_for():
    """Nobody waits for a device that is gone."""
    engine, state = answered("dev-1", "dev-2", "dev-3")
    state, actions = engine.handle(state, WentOffline("dev-4"))
    assert actions == ()
    _, (closed, open_) = engine.handle(state, WentOffline("dev-5"))
    assert closed.record.missing == ("dev-4", "dev-5")
    assert (open_.plan.round, set(open_.plan.assignments)) == (2, set(DEVICES[:3])), "nor need the next round wait"


def test_revoked_device_is_not_counted():
    """The open round closes on the quorum of those who are left, the next one opens without it and asks it for nothing."""
    engine, state = opened(quorum=1.0)
    state, actions = give(engine, state, *DEVICES[:4])
    assert actions == ()
    state, actions = engine.handle(state, Left("dev-5"))
    assert kinds(actions) == ["RoundClosed", "OpenRound"]
    assert set(state.plan.assignments) == set(state.devices) == set(DEVICES[:4])
    assert engine.handle(state, Left("dev-5")) == (state, ())


def test_revoked_after_its_answer_counts():
    """Its upload was durable before."""
    engine, state = answered("dev-5", quorum=1.0)
    state, _ = engine.handle(state, Left("dev-5"))
    state, actions = give(engine, state, *DEVICES[:4])
    assert kinds(actions) == ["RoundClosed", "OpenRound"]
    assert actions[0].record.contributed == 5
    assert set(state.plan.assignments) == set(DEVICES[:4])


def test_answer_of_gone_device_still_counts():
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


def gathering():
    """Return (engine, state) after round 1 of five, with nobody there."""
    engine, state = opened()
    state = offline(engine, state, *DEVICES)
    state, actions = give(engine, state, *DEVICES[:3])
    assert kinds(actions) == ["RoundClosed", "Gather"]
    assert state.plan is None
    return engine, state


def test_empty_fleet_gathers_a_quorum():
    """A restarted broker must not have one device train alone while the others reconnect."""
    engine, state = gathering()
    state, actions = online(engine, state, "dev-2", "dev-4")
    assert (actions, state.plan) == ((), None)
    _, (open_,) = online(engine, state, "dev-5")
    assert (open_.plan.round, set(open_.plan.assignments)) == (2, {"dev-2", "dev-4", "dev-5"})


def test_gathering_may_outlast_its_deadline():
    """The deadline of the gathering may pass before anybody comes."""
    engine, state = gathering()
    state, actions = engine.handle(state, DeadlinePassed(1))
    assert actions == ()
    state, (open_,) = online(engine, state, "dev-2")
    assert (open_.plan.round, set(open_.plan.assignments)) == (2, {"dev-2"})
    assert not state.deadline_passed


def test_final_round_asks_everybody():
    """The final round asks everybody to report and ends the run."""
    engine, state = opened(devices=("dev-1", "dev-2"), rounds=1)
    state, (_, open_) = give(engine, state, "dev-1", "dev-2")
    assert open_.plan.final
    assignment = open_.plan.assignments["dev-1"]
    assert (assignment.train, assignment.evaluate) == (False, True)
    assert (assignment.phase, assignment.share) == (Phase.SCORE, Share.TRAIN)
    state, actions = give(engine, state, "dev-1", "dev-2", samples=5)
    assert kinds(actions) == ["RoundClosed", "RunFinished"]
    record = actions[0].record
    assert (record.final, record.correct, record.tested) == (True, 6, 8)
    assert record.device_accuracy == {"dev-1": (3, 4), "dev-2": (3, 4)}
    assert state.finished
    assert engine.handle(state, CameOnline("dev-7")) == (state, ())


def test_same_transitions_give_same_state():
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


def test_durable_together_count_in_one_round():
    """After the deadline the first of them already makes the quorum; the others must not fall into the next round."""
    engine, state = answered(*DEVICES[:2], quorum=0.6)
    state, actions = engine.handle(state, DeadlinePassed(1))
    assert not actions
    recorded = engine.record(state, [durable(engine, state, device) for device in DEVICES[2:]])
    assert recorded.plan is state.plan
    after, actions = engine.advance(state, recorded)
    assert kinds(actions) == ["RoundClosed", "OpenRound"]
    assert actions[0].record.contributed == len(DEVICES)
    assert (after.round, len(after.received)) == (2, 0)


def test_two_steps_give_what_handle_gives():
    """The two steps of a transition give what handle gives."""
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
