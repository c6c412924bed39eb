"""Devices that say they can't: what the engine expects of them afterwards, and what the log says."""

import logging

import pytest

from aggregator.rounds.state import DeadlinePassed, Declined
from aggregator.run_log import RunLog, waiting_for
from shoal.protocol.messages import DeclineReason
from tests.helpers.engines import DEVICES, answered, give, kinds, opened
from tests.helpers.plans import run_plan


def decline(engine, state, *devices, reason=DeclineReason.DATA, nonce=None):
    actions = ()
    for device in devices:
        state, more = engine.handle(state, Declined(device, nonce or engine.nonce(state.round), reason))
        actions += more
    return state, actions


def test_closes_when_all_others_answered():
    """The round closes as soon as all others have answered."""
    engine, state = opened()
    state, actions = decline(engine, state, "dev-4")
    assert actions == ()
    state, actions = give(engine, state, "dev-1", "dev-2", "dev-3", "dev-5")
    assert kinds(actions) == ["RoundClosed", "OpenRound"]
    record = actions[0].record
    assert (record.contributed, record.missing, record.declined) == (4, ("dev-4",), {"dev-4": "data"})


def test_last_to_decline_closes_the_round():
    engine, state = answered(*DEVICES[:4])
    _, actions = decline(engine, state, "dev-5", reason=DeclineReason.TASK)
    assert kinds(actions) == ["RoundClosed", "OpenRound"]
    assert actions[0].record.declined == {"dev-5": "task"}


@pytest.mark.parametrize(("least", "closes"), [(2, True), (3, False)])
@pytest.mark.parametrize("reason", [DeclineReason.DATA, DeclineReason.TASK, DeclineReason.METERED])
def test_quorum_is_of_those_that_can(reason, least, closes):
    """Of five devices three decline: two are enough if means of two are allowed, however the others came to decline."""
    engine, state = opened(min_contributors=least)
    state, _ = decline(engine, state, "dev-3", "dev-4", "dev-5", reason=reason)
    state, first = give(engine, state, "dev-1")
    assert first == ()
    state, actions = give(engine, state, "dev-2")
    assert bool(actions) is closes
    _, actions = engine.handle(state, DeadlinePassed(state.round))
    assert closes or actions == ()


def test_another_nonce_counts_for_nothing():
    """Another rounds nonce counts for nothing."""
    engine, state = opened()
    state, _ = decline(engine, state, "dev-5", nonce=engine.nonce(2))
    assert state.declined == {}
    before, _ = engine.begin(DEVICES)
    assert engine.handle(before, Declined("dev-5", engine.nonce(0), DeclineReason.DATA)) == (before, ())


def test_upload_that_comes_after_all_counts():
    engine, state = opened()
    state, _ = decline(engine, state, "dev-1")
    state, actions = give(engine, state, *DEVICES)
    assert (actions[0].record.contributed, actions[0].record.declined) == (5, {})


def test_the_waiting_line_names_them_apart():
    engine, state = opened()
    state, _ = decline(engine, state, "dev-2", "dev-5")
    state, _ = decline(engine, state, "dev-3", reason=DeclineReason.REFUSED)
    assert waiting_for(state) == (
        "round 1: 0 of 5, waiting for dev-1, dev-4; data do not fit the task: dev-2, dev-5; refused by the device: dev-3"
    )


def test_all_declined_asks_nobody():
    """Where all decline the line does not ask who refuses."""
    engine, state = opened()
    state, _ = decline(engine, state, *DEVICES)
    state, _ = engine.handle(state, DeadlinePassed(1))
    assert waiting_for(state) == f"round 1: 0 of 5; data do not fit the task: {', '.join(DEVICES)}"


def test_the_log_names_each_of_them_once(caplog):
    caplog.set_level(logging.WARNING, "shoal.aggregator")
    engine, state = opened()
    lines = RunLog(run_plan())
    said = []
    for round_, odd in enumerate(((), ("dev-5",), (), ("dev-4", "dev-5"), (), ("dev-5",)), 1):
        assert state.round == round_
        state, _ = decline(engine, state, *odd)
        state, actions = give(engine, state, *(d for d in DEVICES if d not in odd))
        lines.closed(actions[0].record, 1.0, 10)
        said.append(len(caplog.records))
    assert said == [0, 1, 1, 2, 2, 2]
    assert [r.kv["devices"] for r in caplog.records] == [
        "data do not fit the task: dev-5",
        "data do not fit the task: dev-4, dev-5",
    ]


@pytest.mark.parametrize("reason", list(DeclineReason))
def test_every_obstacle_has_words(reason):
    engine, state = opened()
    state, _ = decline(engine, state, "dev-1", reason=reason)
    assert waiting_for(state).endswith(": dev-1")
