"""The facts of an engine's state, in each phase of a run."""

from aggregator.rounds.engine import DeadlinePassed
from aggregator.rounds.state import Order, Ordered, WentOffline
from aggregator.status.watch import run_facts
from tests.helpers.engines import DEVICES, answered, give, online, opened
from tests.helpers.plans import KEY_VERSION, engine_of, run_plan


def facts(state):
    return run_facts(state, since_s=100, deadline_at_s=160)


def test_gathering_waits_for_the_offline():
    """While devices are gathered those that are not online are waited for."""
    engine = engine_of(run_plan(quorum=0.5, min_contributors=2))
    state, _ = engine.begin(DEVICES, KEY_VERSION)
    state, _ = online(engine, state, "dev-1")
    found = facts(state)
    assert (found.run, found.phase, found.round, found.since_s, found.deadline_at_s) == (1, "gathering", 0, 100, 160)
    assert (found.received, found.quorum, found.waiting) == (1, 5, DEVICES[1:])
    late, _ = engine.handle(state, DeadlinePassed(0))
    found = facts(late)
    assert (found.quorum, found.deadline_passed) == (2, True)
    assert found.shortage == "1 here and 2 must be (min_contributors 2)"
    assert "start dev-2" in found.advice


def test_round_waits_for_missing_uploads():
    """In a round those that have not uploaded are waited for."""
    engine, state = answered("dev-1", "dev-3", quorum=0.8)
    state, _ = engine.handle(state, WentOffline("dev-2"))
    found = facts(state)
    assert (found.phase, found.round, found.received, found.quorum) == ("round", 1, 2, 4)
    assert found.waiting == ("dev-2", "dev-4", "dev-5")
    assert (found.deadline_passed, found.shortage, found.obstacle) == (False, "", "")


def test_closing_round_waits_for_nobody():
    """A round that is being closed waits for no device."""
    engine, state = answered("dev-1", quorum=0.8)
    state, _ = engine.handle(state, DeadlinePassed(1))
    found = facts(state)
    assert (found.computing, found.waiting, bool(found.shortage)) == (False, DEVICES[1:], True)
    found = run_facts(state, since_s=100, deadline_at_s=160, computing=True)
    assert (found.computing, found.phase, found.received) == (True, "round", 1)
    assert (found.waiting, found.shortage) == ((), "")


def test_a_finished_run_waits_for_nothing():
    engine, state = opened(rounds=1)
    for _ in range(2):
        state, _ = give(engine, state, *state.waiting)
    found = facts(state)
    assert (found.phase, found.deadline_at_s, found.waiting, found.quorum) == ("finished", None, (), 0)


def test_pause_waits_for_the_owner():
    """A paused run waits for the owner and for no device."""
    engine, state = opened()
    state, _ = engine.handle(state, Ordered(Order.PAUSE))
    found = facts(state)
    assert (found.order, found.phase, found.waiting) == ("paused by the owner", "round", DEVICES)
    state, _ = give(engine, state, *DEVICES)
    state, _ = engine.handle(state, WentOffline("dev-1"))
    state, _ = engine.handle(state, DeadlinePassed(state.round))
    found = facts(state)
    assert (found.order, found.phase, found.waiting, found.deadline_at_s) == (
        "paused by the owner",
        "gathering",
        (),
        None,
    )
    assert (found.shortage, found.obstacle) == ("", "")
