"""The phases of a run, and the table of their transitions."""

import dataclasses
import itertools

import pytest

from aggregator.rounds.state import (
    TRANSITIONS,
    CameOnline,
    PhaseError,
    RunPhase,
    check_transition,
    phase_of,
)
from tests.helpers.engines import DEVICES, give, opened


def states():
    """Return a state in each phase."""
    engine, state = opened(rounds=1)
    begun, _ = engine.begin(DEVICES)
    final, _ = give(engine, state, *DEVICES)
    finished, _ = give(engine, final, *DEVICES)
    return dict(zip(RunPhase, (begun, state, final, finished), strict=True))


def test_each_phase_is_recognised():
    assert {phase: phase_of(state) for phase, state in states().items()} == {phase: phase for phase in RunPhase}


@pytest.mark.parametrize(("before", "after"), [*itertools.permutations(RunPhase, 2)])
def test_only_listed_changes_of_phase_pass(before, after):
    found = states()
    if (before, after) in TRANSITIONS:
        check_transition(found[before], found[after])
    else:
        with pytest.raises(PhaseError, match=f"from {before.value} to {after.value}"):
            check_transition(found[before], found[after])


def test_the_engine_checks_each_event(monkeypatch):
    engine, state = opened()
    begun, _ = engine.begin(DEVICES)
    monkeypatch.setattr(engine, "_advance", lambda _state: (dataclasses.replace(begun, finished=True), ()))
    with pytest.raises(PhaseError, match="from round to finished"):
        engine.handle(state, CameOnline(DEVICES[0]))
