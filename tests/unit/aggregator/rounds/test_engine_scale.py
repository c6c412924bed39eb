"""A fleet of thousands: nothing that happens once for each device walks over all devices."""

import pytest

from aggregator.rounds.engine import CameOnline, Left, WentOffline
from tests.helpers.engines import Name
from tests.helpers.plans import engine_of, run_plan, stored, upload_of

DIGEST = b"d" * 32
MOST = 60
"""Looks at names for one event; a walk over the larger fleet alone takes 300."""
CASES = {
    "fedavg": ({}, {}),
    "ifca": ({"k": 2}, {"origins": 2, "max_models": 2}),
    "cfl": ({}, {}),
    "fedgroup": ({"groups": 3}, {}),
    "fesem": ({"k": 3}, {}),
    "one-shot": ({"k": 3}, {}),
}


def looks(engine, state, event):
    """Return the state after an event that leads to nothing, and the looks at names that it took."""
    Name.looks = 0
    state, actions = engine.handle(state, event)
    assert not actions
    return state, Name.looks


@pytest.mark.parametrize("algorithm", CASES)
@pytest.mark.parametrize("count", [30, 300])
def test_events_walk_over_no_fleet(algorithm, count):
    """An upload or a departure walks over no fleet."""
    settings, changes = CASES[algorithm]
    devices = tuple(Name(f"dev-{i:04}") for i in range(count))
    engine = engine_of(run_plan(algorithm, settings, quorum=1.0, **changes))
    state, _ = engine.begin(devices)
    for device in devices:
        state, _ = engine.handle(state, CameOnline(device))
    assert state.round == 1
    asked = [d for d in devices if d in state.plan.assignments]
    assert len(asked) > 2
    answers = {d: upload_of(engine, state, d) for d in asked}
    for device in asked[:-1]:
        state, took = looks(engine, state, stored(*answers[device]))
        assert took < MOST
    state, took = looks(engine, state, WentOffline(asked[0]))
    assert took < MOST
    assert state.awaited == 1


def test_the_counts_are_those_of_the_names():
    """Through every kind of event: who is waited for, and how many the quorum is of."""
    devices = tuple(f"dev-{i}" for i in range(6))
    engine = engine_of(run_plan(quorum=1.0, min_contributors=1))
    state, _ = engine.begin(devices)
    for device in devices:
        state, _ = engine.handle(state, CameOnline(device))
    answers = {d: upload_of(engine, state, d) for d in devices}

    def give(device):
        return stored(*answers[device])

    script = [
        give("dev-0"), WentOffline("dev-0"), CameOnline("dev-0"), Left("dev-0"), WentOffline("dev-1"), give("dev-1"),
        WentOffline("dev-2"), Left("dev-2"), CameOnline("dev-2"), Left("dev-2"), give("dev-2"), Left("dev-3"),
        CameOnline("dev-9"), WentOffline("dev-9"), give("dev-0"), Left("dev-4"), WentOffline("dev-4"),
    ]  # fmt: skip
    for event in script:
        state, _ = engine.handle(state, event)
        assignments = state.plan.assignments
        assert state.awaited == len(set(state.waiting) - state.unavailable), event
        assert state.asked == sum(d in state.devices or d in state.received for d in assignments), event
        assert state.unavailable <= set(state.waiting), event
