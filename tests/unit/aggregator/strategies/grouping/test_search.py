"""The search for groups, driven by IFCA, whose k is found: looks, trials, refusals, absent devices, revoked ones."""

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.grouping.search import LOOKS, next_look
from shoal.protocol.messages import Phase, Share
from tests.helpers.plans import Rounds, contribution, run_plan

LENGTH = 40
DEVICES = tuple(f"dev-{i:02d}" for i in range(12))
TRUTH = {d: i % 2 for i, d in enumerate(DEVICES)}
RNG = np.random.default_rng(4)
GOALS = RNG.standard_normal((2, LENGTH)) * 5
APART = {d: (GOALS[g] + RNG.standard_normal(LENGTH)).astype(np.float32) for d, g in TRUTH.items()}
ALIKE = {d: (GOALS[0] + RNG.standard_normal(LENGTH)).astype(np.float32) for d in DEVICES}


def rounds_of(**changes):
    segments = (dataclasses.replace(run_plan().segments[0], length=LENGTH),)
    return Rounds(
        run_plan("ifca", {}, **{"min_contributors": 3, "rounds": 80, "segments": segments, **changes}), DEVICES
    )


class Fleet:
    """Devices with updates ``vectors`` (d,); those in ``absent`` do not answer, and ``gains`` of each group lowers its loss."""

    def __init__(self, vectors=APART, gains=lambda _: 0.5, absent=()):
        self.vectors, self.gains, self.absent = vectors, gains, absent
        self.asked = []

    def __call__(self, device, assignment, round_):
        if not self.asked or self.asked[-1][0] != round_:
            self.asked.append((round_, {}))
        self.asked[-1][1][device] = assignment
        if device in self.absent:
            return None
        model = assignment.candidates[TRUTH[device] % len(assignment.candidates)]
        if assignment.train:
            return contribution(device, self.vectors[device], round=round_, model=model)
        copied = assignment.candidates[0] > 32
        loss = 2.0 if copied else 2.0 - self.gains(device)
        return contribution(device, round=round_, model=model, phase=assignment.phase, loss=loss)


def kinds(rounds):
    return [event.kind for event in rounds.events]


def test_looks_are_few_and_go_on():
    assert [next_look(n) for n in (1, 2, 5, 15, 30, 60)] == [5, 5, 15, 30, 60, 120]


def test_one_group_costs_no_round():
    """Updates alike are one group and a look costs no round."""
    rounds, fleet = rounds_of(), Fleet(ALIKE)
    for _ in range(16):
        assert set(rounds.step(fleet).clusters.values()) == {0}
    assert kinds(rounds) == ["one-group"] * 3
    assert [e.round for e in rounds.events] == list(LOOKS[:3])
    assert all(e.detail["k"] == 1 and e.detail["silhouette"] < 0.25 for e in rounds.events)
    expected = 16 * np.mean([ALIKE[d] for d in DEVICES], axis=0)
    np.testing.assert_allclose(rounds.theta(rounds.state.search.one), expected, rtol=1e-4, atol=1e-4)


def test_groups_that_gain_become_the_models():
    """Two steps each: that of the look and one of the trial."""
    rounds, fleet = rounds_of(), Fleet()
    for _ in range(5):
        rounds.step(fleet)
        rounds.reload()
    assert kinds(rounds) == ["groups-tried", "groups-found"]
    assert rounds.events[-1].detail | {"silhouette": 0, "gain": 0} == {
        "k": 2,
        "silhouette": 0,
        "sizes": [6, 6],
        "models": 2,
        "gain": 0,
    }
    assert rounds.state.choice == TRUTH
    for j, slot in enumerate(rounds.state.slots):
        expected = 2 * np.mean([APART[d] for d in DEVICES if TRUTH[d] == j], axis=0)
        np.testing.assert_allclose(rounds.theta(slot), expected, rtol=1e-4, atol=1e-4)
    work = [{(o.phase, o.candidates, o.train, o.share) for o in asked.values()} for _, asked in fleet.asked]
    train, score = Phase.TRAIN, Phase.SCORE
    assert work == [
        {(train, (32,), True, Share.TRAIN)},
        {(train, (32,), True, Share.TRAIN)},
        {(train, (0,), True, Share.TRAIN), (train, (1,), True, Share.TRAIN)},
        {(score, (0,), False, Share.TRAIN), (score, (1,), False, Share.TRAIN)},
        {(score, (33,), False, Share.TRAIN), (score, (34,), False, Share.TRAIN)},
    ], "both ways are trained, and scored on the training share"


def test_uneven_gains_keep_the_one_model():
    """The one model has lost three rounds, and nothing else."""
    rounds = rounds_of()
    fleet = Fleet(gains=lambda device: 1.0 if device in DEVICES[:4] else -0.2)
    rounds.go(fleet, 6)
    assert kinds(rounds) == ["groups-tried", "groups-refused"]
    assert rounds.events[-1].detail["gain"] < rounds.events[-1].detail["needed"]
    expected = 3 * np.mean([APART[d] for d in DEVICES], axis=0)
    np.testing.assert_allclose(rounds.theta(rounds.state.search.one), expected, rtol=1e-4, atol=1e-4)
    rounds.go(fleet, 12)
    assert kinds(rounds) == ["groups-tried", "groups-refused", "groups-tried"], "the look in round 5 was left out"
    assert rounds.state.search.trained == LOOKS[2]


@pytest.mark.parametrize("round_", [2, 3, 4, 5])
def test_a_trial_without_a_group_ends(round_):
    rounds, fleet = rounds_of(), Fleet()
    rounds.go(fleet, round_ - 1)
    fleet.absent = [d for d in DEVICES if TRUTH[d]]
    rounds.step(fleet)
    fleet.absent = ()
    while rounds.state.search is not None and rounds.state.search.trial is not None:
        rounds.step(fleet)
    assert (rounds.events[-1].kind, rounds.events[-1].detail["reason"]) == ("groups-refused", "devices absent")


def test_revoked_devices_leave_a_trial():
    rounds, fleet = rounds_of(), Fleet()
    rounds.step(fleet)
    rounds.state = rounds.strategy.retain(rounds.state, frozenset(DEVICES[:8]))
    rounds.devices = DEVICES[:8]
    assert set(rounds.state.search.trial.clusters) == set(DEVICES[:8])
    rounds.go(fleet, 4)
    assert kinds(rounds) == ["groups-tried", "groups-found"]


def test_look_asks_all_devices():
    """A look asks all devices under partial participation."""
    rounds, fleet = rounds_of(participation=0.25), Fleet()
    rounds.go(fleet, 9)
    assert [len(asked) for _, asked in fleet.asked] == [12] * 5 + [3] * 4
    assert [{TRUTH[d] for d in asked} for _, asked in fleet.asked[5:]] == [{0}, {1}, {0}, {1}]


def test_no_look_without_use():
    """There is no look that the run could not use."""
    rounds = rounds_of(rounds=5).after(Fleet(), 5)
    assert kinds(rounds) == []


def test_too_few_for_two_are_one_group():
    """Too few devices for two means are one group."""
    rounds = rounds_of().after(Fleet(), 2, present=DEVICES[:5])
    assert kinds(rounds) == []
    assert rounds.state.search.trained == 2


def test_small_groups_join_another():
    """Small groups count in k and join another."""
    vectors = {**APART, "dev-11": (RNG.standard_normal(LENGTH) * 5).astype(np.float32)}
    rounds, fleet = rounds_of(), Fleet(vectors)
    rounds.go(fleet, 5)
    assert (rounds.events[-1].kind, rounds.events[-1].detail["sizes"]) == ("groups-found", [6, 5, 1])
    assert (rounds.events[-1].detail["k"], rounds.events[-1].detail["models"]) == (3, 2)
