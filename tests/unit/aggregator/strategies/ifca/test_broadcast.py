"""IFCA's saving of communication (extended, section 4.3): who is sent which models while identities are stable."""

import numpy as np
import pytest

from aggregator.strategies.ifca.state import Broadcast
from tests.helpers.plans import D, Rounds, contribution, run_plan

DEVICES = ("a", "b", "c", "d")
HOME = {"a": 0, "b": 1, "c": 1, "d": 0, "e": 1}
ALL = (0, 1)


class Watched(Rounds):
    """Rounds whose devices go home, but for the wandering ones; ``sent`` has each round's candidates by device."""

    def __init__(self, *, wander=None, origins=2, **settings):
        run = run_plan("ifca", {"k": 2, **settings}, origins=origins, rounds=60)
        super().__init__(run, DEVICES)
        self.wander = wander or {}
        self.sent = []

    def answer(self, device, assignment, round_):
        self.sent[-1][device] = assignment.candidates
        first = self.state.first
        home = self.wander.get((device, round_), HOME[device])
        model = first + home if len(assignment.candidates) > 1 else assignment.candidates[0]
        return contribution(device, np.ones(D), round=round_, model=model, loss=1.0)

    def play(self, rounds, present=None):
        for _ in range(rounds):
            self.sent.append({})
            self.step(self.answer, present)
        return self.sent


def full(sent):
    """Return which rounds (from 1) were full broadcasts to everybody."""
    return [i + 1 for i, assignments in enumerate(sent) if all(len(c) == 2 for c in assignments.values())]


@pytest.mark.parametrize(
    ("settings", "rounds", "expected"),
    [
        ({}, 12, range(1, 13)),
        ({"stable_rounds": 2, "probe_every": 1}, 8, range(1, 9)),
        ({"stable_rounds": 3, "probe_every": 9, "wander": {("b", 3): 0}}, 10, range(1, 8)),
    ],
    ids=["nothing is saved unless asked", "every round is a probe", "a change starts the count again"],
)
def test_rounds_that_are_full_broadcasts(settings, rounds, expected):
    assert full(Watched(**settings).play(rounds)) == list(expected)


def test_stable_devices_get_their_own_model():
    """Round 1 has nobody who chooses again; rounds 2 to 4 are the three stable ones; then every 4th round is a probe."""
    rounds = Watched(stable_rounds=3, probe_every=4)
    assert full(rounds.play(16)) == [1, 2, 3, 4, 8, 12, 16]
    assert rounds.sent[5] == {"a": (0,), "b": (1,), "c": (1,), "d": (0,)}
    assert [(e.round, e.kind) for e in rounds.events] == [(4, "broadcast-narrowed")]


def test_change_in_a_probe_broadcasts_all():
    """Device b chooses another cluster in the probe of round 7 and stays there: five stable rounds until it narrows again."""
    rounds = Watched(stable_rounds=3, probe_every=3, wander={("b", r): 0 for r in range(7, 30)})
    assert full(rounds.play(14)) == [1, 2, 3, 4, 7, 8, 9, 10, 13]
    assert rounds.sent[10]["b"] == (0,)
    assert [(e.round, e.kind) for e in rounds.events] == [
        (4, "broadcast-narrowed"),
        (7, "broadcast-widened"),
        (10, "broadcast-narrowed"),
    ]
    assert rounds.events[1].detail == {"changed": ["b"]}


def test_unseen_device_is_sent_all_models():
    """A newcomer chooses once; that is no change, and the others stay with their own."""
    rounds = Watched(stable_rounds=2, probe_every=50)
    rounds.play(5)
    rounds.play(3, (*DEVICES, "e"))
    assert [r.get("e") for r in rounds.sent[5:]] == [ALL, (1,), (1,)]
    assert [r["a"] for r in rounds.sent[5:]] == [(0,)] * 3
    assert rounds.state.devices == (*DEVICES, "e")


def test_long_absent_device_gets_all_models():
    """Its last choice is from before the models moved: it has to choose again, and a change widens the broadcast."""
    rounds = Watched(stable_rounds=2, probe_every=50, wander={("b", 2): 0, ("d", 7): 1})
    rounds.play(1)
    rounds.play(5, ("a", "b", "c"))
    assert rounds.sent[5] == {"a": (0,), "b": (1,), "c": (1,)}
    rounds.play(2)
    assert rounds.sent[6] == {"a": (0,), "b": (1,), "c": (1,), "d": ALL}
    assert set(rounds.sent[7].values()) == {ALL}


def test_stability_counts_from_kept_start():
    """Restarts are full broadcasts; identities of two starts are not compared."""
    rounds = Watched(stable_rounds=2, probe_every=50, restarts=2, restart_rounds=4, origins=4)
    assert full(rounds.play(14)) == list(range(1, 11))
    assert len(rounds.sent[10]["a"]) == 1


def test_the_final_round_offers_every_model():
    """The paper's test protocol, whatever was saved before."""
    rounds = Watched(stable_rounds=1, probe_every=50)
    rounds.play(5)
    assert rounds.strategy.final(rounds.state, 6, DEVICES).assignments["a"].candidates == ALL


def test_unchosen_round_proves_nothing():
    """With partial participation the first rounds see only new devices."""
    unknown = Broadcast().observed({"a": 0}, {}, full=True)
    assert (unknown.stable, unknown.confirmed) == (0, {"a"})
    assert not unknown.settled(1)
    assert unknown.observed({"a": 0}, {"a": 0}, full=True).settled(1)
