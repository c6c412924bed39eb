"""The owner's orders to pause, resume and stop a run: which may follow which, and their effect on the engine."""

import pytest

from aggregator.rounds.engine import STOPPED
from aggregator.rounds.state import (
    WORDS,
    CameOnline,
    DeadlinePassed,
    Order,
    Ordered,
    RunPhase,
    WentOffline,
    may_follow,
    newest,
    phase_of,
)
from tests.helpers.engines import DEVICES, answered, give, kinds, opened
from tests.helpers.plans import KEY_VERSION, engine_of, run_plan


def order(engine, state, wanted):
    return engine.handle(state, Ordered(wanted))


def paused():
    """Return (engine, state) of a run that is paused after its first round."""
    engine, state = opened(rounds=9)
    state, _ = order(engine, state, Order.PAUSE)
    return engine, give(engine, state, *DEVICES)[0]


@pytest.mark.parametrize(
    ("before", "allowed"),
    [
        (Order.GO, set(Order)),
        (Order.PAUSE, set(Order)),
        (Order.STOP, {Order.STOP, Order.STOP_NOW}),
        (Order.STOP_NOW, {Order.STOP_NOW}),
    ],
)
def test_nothing_follows_stop_but_faster_one(before, allowed):
    assert {after for after in Order if may_follow(before, after)} == allowed
    for after in Order:
        assert newest(before, after) is (after if after in allowed else before)
    assert bool(WORDS[before]) is (before is not Order.GO)


def test_pause_completes_the_round():
    """A paused round completes and none follows until the run is resumed."""
    engine, state = opened(rounds=3)
    state, actions = order(engine, state, Order.PAUSE)
    assert (actions, phase_of(state)) == ((), RunPhase.ROUND)
    state, actions = give(engine, state, *DEVICES)
    assert kinds(actions) == ["RoundClosed", "Gather"]
    assert actions[0].record.contributed == len(DEVICES)
    state, actions = engine.handle(state, DeadlinePassed(1))
    assert (actions, state.plan) == ((), None)
    state, actions = order(engine, state, Order.GO)
    assert kinds(actions) == ["OpenRound"]
    assert (state.round, state.deadline_passed) == (2, False)


def test_resumed_run_gathers_for_a_deadline():
    """A run that is resumed with too few devices gathers for a whole deadline."""
    engine, state = paused()
    for device in DEVICES:
        state, _ = engine.handle(state, WentOffline(device))
    state, _ = engine.handle(state, DeadlinePassed(1))
    state, actions = order(engine, state, Order.GO)
    assert (kinds(actions), state.deadline_passed) == (["Gather"], False)
    assert order(engine, state, Order.GO)[1] == ()


def test_stop_ends_with_a_final_round():
    """A stopped run closes its round and ends with a final one."""
    engine, state = opened(rounds=9)
    state, actions = order(engine, state, Order.STOP)
    assert actions == ()
    state, actions = give(engine, state, *DEVICES)
    assert kinds(actions) == ["RoundClosed", "OpenRound"]
    assert (actions[1].plan.final, state.round) == (True, 10)
    state, actions = give(engine, state, *DEVICES)
    assert kinds(actions) == ["RoundClosed", "RunFinished"]
    (event,) = actions[0].record.events
    assert (event["kind"], event["by"], event["after"]) == (STOPPED, "owner", 1)


def test_stop_now_closes_with_durable_ones():
    """A stop now closes the round with the uploads that are durable."""
    engine, state = answered("dev-1", "dev-2", rounds=9)
    state, actions = order(engine, state, Order.STOP_NOW)
    assert kinds(actions) == ["RoundClosed", "OpenRound"]
    assert (actions[0].record.contributed, actions[1].plan.final) == (2, True)
    # The final round has the result of the run, and a stop does not cut it short.
    assert order(engine, state, Order.STOP_NOW) == (state, ())


@pytest.mark.parametrize("wanted", [Order.STOP, Order.STOP_NOW])
def test_stop_before_round_1_is_over_at_once(wanted):
    """A run stopped before its first round is over at once."""
    engine = engine_of(run_plan())
    state, _ = engine.begin(DEVICES, KEY_VERSION)
    state, actions = order(engine, state, wanted)
    assert (actions, state.finished, phase_of(state)) == ((), True, RunPhase.FINISHED)
    assert engine.handle(state, CameOnline("dev-1")) == (state, ())


def test_stop_in_the_last_round():
    """A run stopped in its last round has done all of them."""
    engine, state = opened(rounds=1)
    state, _ = order(engine, state, Order.STOP)
    state, _ = give(engine, state, *DEVICES)
    state, actions = give(engine, state, *DEVICES)
    assert actions[0].record.events == ()
