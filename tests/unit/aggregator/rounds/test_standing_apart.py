"""A device is named after three rounds in a row in which its update stood apart, also by a restarted aggregator."""

import numpy as np

from aggregator.rounds.standstill import ROUNDS_APART, observed
from aggregator.rounds.state import RoundClosed
from aggregator.strategies.base import STANDS_APART
from aggregator.strategies.robust import Finding, Standings
from tests.helpers.engines import opened
from tests.helpers.plans import D, stored, upload_of

DEVICES = tuple(f"dev-{i}" for i in range(8))
FALSE = DEVICES[-1]
APART, IN_LINE = Finding(True, {0: True}), Finding(False, {0: False})


def test_third_round_names_the_device_once():
    """The third round in a row names the device once."""
    known, named = Standings(), []
    for round_ in range(1, 6):
        known, events = observed(known, {"a": APART, "b": IN_LINE}, round_, "filter")
        named += events
    (event,) = named
    assert (event.round, event.kind) == (ROUNDS_APART, STANDS_APART)
    assert event.detail == {"device": "a", "rounds": ROUNDS_APART, "robust": "filter"}
    assert known.rounds == {"a": 5}


def test_round_in_line_restarts_the_count():
    """A round in line starts the count again and a round elsewhere does not."""
    known = Standings()
    for found in ({"a": APART}, {"a": APART}, {"b": APART}, {}, {"a": IN_LINE}, {"a": APART}, {"a": APART}):
        known, events = observed(known, found, 1, "filter")
        assert not events
    known, events = observed(known, {"a": APART}, 9, "filter")
    assert [e.detail["device"] for e in events] == ["a"]


def test_directions_are_known_by_model():
    known, _ = observed(Standings(), {"a": Finding(True, {1: True, 2: False})}, 1, "filter")
    assert known.against == {"a": (1,)}
    known, _ = observed(known, {"a": Finding(True, {4: True})}, 2, "filter")
    assert known.against == {"a": (1, 4)}
    known, _ = observed(known, {"a": Finding(False, {1: False, 4: False})}, 3, "filter")
    assert known.against == {}


def play(engine, state):
    """Answer the open round; the last device's update is reversed. Return the state and the round's record."""
    rng = np.random.default_rng(state.round)
    base = np.ones(D)
    for device in DEVICES:
        values = (base + 0.1 * rng.standard_normal(D)) * (-1 if device == FALSE else 1) / 10
        upload, body = upload_of(engine, state, device, values=values.astype(np.float32))
        state, actions = engine.handle(state, stored(upload, body))
    (record,) = [a.record for a in actions if isinstance(a, RoundClosed)]
    return state, [e["device"] for e in record.events if e["kind"] == STANDS_APART]


def test_record_of_third_round_names_device():
    engine, state = opened(DEVICES, robust="filter")
    named = []
    for _ in range(5):
        state, found = play(engine, state)
        named.append(found)
    assert named == [[], [], [FALSE], [], []]


def test_without_a_rule_nobody_is_named():
    engine, state = opened(DEVICES, robust="off")
    for _ in range(4):
        state, found = play(engine, state)
        assert found == []
