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
from tests.helpers.engines import DEVICES, give, kinds, online, opened
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


def test_deadline_of_another_round():
    """A deadline of another round means nothing."""
    engine, state = opened()
    state, _ = give(engine, state, *DEVICES)
    assert state.round == 2
    state, actions = engine.handle(state, DeadlinePassed(1))
    assert actions == ()
    assert not state.deadline_passed


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
    engine, state = opened(quorum=1.0)
    state, _ = give(engine, state, "dev-5")
    state, _ = engine.handle(state, Left("dev-5"))
    state, actions = give(engine, state, *DEVICES[:4])
    assert kinds(actions) == ["RoundClosed", "OpenRound"]
    assert actions[0].record.contributed == 5
    assert set(state.plan.assignments) == set(DEVICES[:4])


def offline(engine, state, *devices):
    for device in devices:
        state, actions = engine.handle(state, WentOffline(device))
        assert actions == ()
    return state


def test_later_rounds_open_by_quorum():
    """Quorum 0.6 of five is three: they need not wait for the other two."""
    engine, state = opened()
    state = offline(engine, state, "dev-4", "dev-5")
    _, (_, open_) = give(engine, state, *DEVICES[:3])
    assert (open_.plan.round, set(open_.plan.assignments)) == (2, set(DEVICES[:3]))


def test_final_round_asks_everybody():
    """The final round asks everybody to report and ends the run."""
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


def test_record_weights_the_loss_by_samples():
    engine, state = opened(devices=("dev-1", "dev-2"))
    state, _ = give(engine, state, "dev-1", loss=1.0, samples=30)
    _, (closed, _) = give(engine, state, "dev-2", loss=3.0, samples=10)
    assert closed.record.loss == pytest.approx(1.5)
    assert closed.record.norms == pytest.approx({"dev-1": np.sqrt(6), "dev-2": np.sqrt(6)})


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
