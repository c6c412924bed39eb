"""FeSEM against k-means written out on whole models, origin and all."""

import numpy as np
import pytest

from aggregator.rounds.relay import States, is_state, settle
from edge_client.learning.nearest import nearest_model
from shoal.errors import ConfigError
from shoal.protocol.documents import SegmentSpec
from tests.helpers.epochs import Fleet, assert_same
from tests.helpers.plans import D, Rounds, contribution, run_plan

DEVICES = tuple(f"dev-{i}" for i in range(8))
RNG = np.random.default_rng(11)
GOALS = RNG.standard_normal((2, D)).astype(np.float32) * 4
GOAL = {d: GOALS[i % 2] + 0.1 * RNG.standard_normal(D).astype(np.float32) for i, d in enumerate(DEVICES)}
SAMPLES = {d: 10 * (i + 1) for i, d in enumerate(DEVICES)}


class World:
    """Devices that walk a part of the way from their centre to their goal; keeps whole models beside the offsets."""

    def __init__(self, pull=0.8, scramble=None, k=2, **changes):
        self.rounds = Rounds(run_plan("fesem", {"k": k}, **changes), DEVICES)
        self.assignment = np.arange(D) if scramble is None else scramble
        self.pull = pull
        self.origin = np.random.default_rng(12).standard_normal(D)
        self.models = {}

    def theta(self, j):
        offset = self.rounds.state.slots[j].offset
        return self.origin if offset is None else self.origin + offset[np.argsort(self.assignment)].astype(np.float64)

    def answer(self, device, assignment, round_):
        (model,) = assignment.candidates
        start = self.theta(model)
        self.models[device] = start + self.pull * (GOAL[device] - start)
        delta = (self.models[device] - start).astype(np.float32)[self.assignment]
        return contribution(device, delta, round=round_, model=model, samples=SAMPLES[device])

    def step(self, present=DEVICES):
        self.models.clear()
        return self.rounds.step(self.answer, present)


def test_each_round_is_one_step_of_k_means_on_the_trained_models():
    world = World()
    for _ in range(4):
        centres = [world.theta(j) for j in range(2)]
        before = dict(world.rounds.state.clusters)
        outcome = world.step()
        for device, theta in world.models.items():
            distances = [float(np.linalg.norm(theta - c)) for c in centres]
            tied = np.isclose(distances[0], distances[1])
            assert outcome.clusters[device] == (before[device] if tied else int(np.argmin(distances)))
        for j in range(2):
            mine = [d for d in DEVICES if outcome.clusters[d] == j]
            weights = [SAMPLES[d] for d in mine]
            np.testing.assert_allclose(
                world.theta(j), np.average([world.models[d] for d in mine], 0, weights), atol=1e-5
            )


def test_the_groups_are_found():
    world = World()
    for _ in range(5):
        clusters = world.step().clusters
    assert len({clusters[d] for d in DEVICES[::2]}) == len({clusters[d] for d in DEVICES[1::2]}) == 1
    assert clusters["dev-0"] != clusters["dev-1"]
    assert any(e.kind == "reassigned" for e in world.rounds.events)


def test_the_first_assignment_is_random_and_even():
    seen = set()
    for seed in range(6):
        clusters = Rounds(run_plan("fesem", {"k": 3}, seed=seed), DEVICES).state.clusters
        assert sorted(np.bincount(list(clusters.values()))) == [2, 3, 3]
        seen.add(tuple(clusters.values()))
    assert len(seen) > 3


def test_a_mask_changes_no_assignment():
    """Distances do not see a permutation of the coordinates, and the means are the permuted means bit for bit."""
    scramble = np.random.default_rng(5).permutation(D)
    clear, masked = World(), World(scramble=scramble)
    for _ in range(4):
        assert clear.step().clusters == masked.step().clusters
    for a, b in zip(clear.rounds.state.slots, masked.rounds.state.slots, strict=True):
        np.testing.assert_allclose(a.offset[scramble], b.offset, rtol=1e-6)


class RoundKeys:
    """The same devices under round keys: they hold the centres and report the nearest."""

    def __init__(self, **changes):
        self.rounds = Rounds(run_plan("fesem", keys="round", **{"settings": {"k": 2}, **changes}), DEVICES)
        self.states = States.of_origins(1)
        self.held = {self.states[0]: np.random.default_rng(12).standard_normal(D)}
        self.steps = ()

    def theta(self, j):
        return self.held[self.states[self.rounds.state.slots[j].origin]]

    def answer(self, device, assignment, round_):
        assert assignment.compare == (0, 1)
        (own,) = assignment.candidates
        centres = {j: self.theta(j).astype(np.float32) for j in assignment.compare}
        delta = (0.8 * (GOAL[device] - self.theta(own))).astype(np.float32)
        nearest = nearest_model(own, delta, assignment.compare, centres)
        return contribution(device, delta, round=round_, model=own, samples=SAMPLES[device], nearest=nearest)

    def step(self):
        outcome = self.rounds.step(self.answer)
        models = self.rounds.strategy.inherited(self.rounds.state).models
        self.rounds.state, self.states, self.steps = settle(self.rounds.state, models, self.states, self.rounds.round)
        for step in self.steps:
            self.held[step.state] = sum(weight * self.held[ref] for weight, ref in step.terms) + step.mean
        return outcome


@pytest.mark.parametrize("changes", [{}, {"weighting": "uniform"}, {"weight_cap": 1.0}, {"min_contributors": 4}])
def test_under_round_keys_centres_and_clusters_are_those_of_a_run_with_one_key(changes):
    one, fresh = World(**changes), RoundKeys(**changes)
    for _ in range(5):
        first, second = one.step(), fresh.step()
        assert second.clusters == first.clusters
        assert [(e.kind, e.detail) for e in second.events] == [(e.kind, e.detail) for e in first.events]
        for j in range(2):
            np.testing.assert_allclose(fresh.theta(j), one.theta(j), atol=1e-5)
    assert any(e.kind == "reassigned" for e in fresh.rounds.events)


def test_under_round_keys_a_centre_is_a_mean_of_the_models_that_its_members_trained_from():
    """Weights of a recipe add up to 1, and no vector outlives the round."""
    world = RoundKeys()
    mixed = []
    for _ in range(4):
        world.step()
        assert all(is_state(slot) for slot in world.rounds.state.slots)
        for step in world.steps:
            assert sum(weight for weight, _ in step.terms) == pytest.approx(1.0, abs=1e-12)
            mixed.append(len(step.terms))
    assert set(mixed) == {1, 2}
    world.rounds.reload()
    assert not world.rounds.reload().arrays


def test_under_round_keys_the_distance_to_a_mixed_centre_is_left_out_of_the_discrepancy():
    world = RoundKeys(settings={"k": 2, "discrepancy": "on"})
    kinds = set()
    for _ in range(4):
        outcome = world.step()
        (found,) = (frozenset(e.detail) for e in outcome.events if e.kind == "discrepancy")
        kinds.add((max(len(step.terms) for step in world.steps), "mean_after" in found))
    assert kinds == {(1, True), (2, False)}


def test_whoever_is_away_keeps_its_centre_and_an_empty_centre_its_model():
    world = World()
    world.step()
    clusters = dict(world.rounds.state.clusters)
    away = {d for d, j in clusters.items() if j == 1}
    kept = world.rounds.state.slots[1]
    world.pull = 0.0
    outcome = world.step(tuple(d for d in DEVICES if d not in away))
    assert outcome.clusters == clusters
    assert world.rounds.state.slots[1] is kept


def test_a_centre_of_too_few_keeps_its_model():
    world = World(min_contributors=5)
    world.step()
    assert all(s.offset is None for s in world.rounds.state.slots)


def test_the_fewest_contributors_follow_a_model_that_moves_into_another_centre():
    """A centre that takes in a model which was trained from a mean of two rests on two."""
    world = World(pull=0.0)
    one = [d for d, j in world.rounds.state.clusters.items() if j == 0][:2]
    two = [d for d, j in world.rounds.state.clusters.items() if j == 1]
    world.pull = 0.5
    world.step((*one, *two))
    assert [s.contributors for s in world.rounds.state.slots] == [2, 4]
    world.pull = 1.0
    for _ in range(3):
        world.step()
    assert any(e.kind == "reassigned" for e in world.rounds.events)
    assert [s.contributors for s in world.rounds.state.slots] == [2, 2]


def test_newcomers_are_assigned_when_they_come():
    world = World()
    world.step(DEVICES[:6])
    state, plan = world.rounds.strategy.plan(world.rounds.state, 2, (*DEVICES, "dev-9"))
    assert plan.assignments["dev-9"].candidates == (state.clusters["dev-9"],)


def test_in_the_end_an_unknown_device_takes_the_model_of_least_loss():
    world = World()
    world.step()
    plan = world.rounds.strategy.final(world.rounds.state, 21, ("dev-0", "stranger"))
    assert plan.assignments["stranger"].candidates == (0, 1)
    assert plan.assignments["dev-0"].candidates == (world.rounds.state.clusters["dev-0"],)


def test_dump_and_load_give_the_same_state():
    worlds = World(), World()
    for world in worlds:
        world.step()
        world.step()
    worlds[1].rounds.reload()
    assert worlds[0].step().clusters == worlds[1].step().clusters
    for a, b in zip(*(w.rounds.state.slots for w in worlds), strict=True):
        assert a.offset.tobytes() == b.offset.tobytes()
        assert (a.contributors, a.version) == (b.contributors, b.version)


def test_the_discrepancy_is_told_when_asked():
    rounds = Rounds(run_plan("fesem", {"discrepancy": "on"}), DEVICES)
    rounds.step(lambda d, o, r: contribution(d, np.full(D, 2.0), round=r, model=o.candidates[0]))
    (event,) = rounds.events
    assert event.kind == "discrepancy"
    assert event.detail["mean"] == pytest.approx(2 * np.sqrt(D))
    assert event.detail["mean_after"] == pytest.approx(0.0)


def in_epochs(rounds=4):
    """Return devices whose mask changes after some rounds, when everybody is at its own centre."""
    return Fleet(run_plan("fesem", {"k": 2}), DEVICES, {**GOAL, "dev-9": GOALS[1]}, pull=0.8).run_to(rounds)


def test_a_rollover_freezes_the_assignment_and_each_centre_goes_on_by_itself():
    """The same models follow as without it, and it is told once."""
    without, rounds = in_epochs(7), in_epochs()
    before = dict(rounds.clusters)
    rounds.rollover()
    assert [s.origin for s in rounds.state.slots] == [0, 1]
    assert rounds.state.frozen
    rounds.reload()
    rounds.run_to(5)
    rounds.rollover()
    rounds.run_to(7)
    assert_same(rounds, without)
    assert rounds.clusters == before
    assert [(e.round, e.kind) for e in rounds.events if e.kind != "reassigned"] == [(4, "assignment-frozen")]


def test_frozen_devices_keep_their_centre_wherever_they_walk():
    rounds = in_epochs()
    before = dict(rounds.clusters)
    rounds.rollover()
    rounds.goals = {d: GOALS[1 - i % 2] for i, d in enumerate(DEVICES)}
    assert rounds.run_to(7).clusters == before


def test_newcomers_of_frozen_centres_take_the_one_of_least_loss():
    rounds = in_epochs()
    rounds.rollover()
    outcome = rounds.step((*DEVICES, "dev-9"))
    asked = {d: o.candidates for r, d, o in rounds.asked if r == 5}
    assert asked.pop("dev-9") == (0, 1)
    assert asked == {d: (outcome.clusters[d],) for d in DEVICES}
    assert outcome.clusters["dev-9"] == outcome.clusters["dev-1"]
    detail = {"device": "dev-9", "cluster": outcome.clusters["dev-1"], "by": "loss"}
    assert [(e.kind, e.detail) for e in outcome.events] == [("assignment-frozen", {}), ("newcomer", detail)]
    assert rounds.state.slots[outcome.clusters["dev-9"]].contributors == 5


def test_centres_that_have_not_moved_share_an_origin_after_a_rollover_too():
    """Before the first round there is nothing to freeze: a random assignment would stay one."""
    without, rounds = in_epochs(5), in_epochs(0)
    assert sorted(rounds.rollover().models) == [0]
    assert [s.origin for s in rounds.state.slots] == [0, 0]
    assert not rounds.state.frozen
    rounds.run_to(5)
    assert_same(rounds, without)
    assert any(e.kind == "reassigned" for e in rounds.events)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settings": {"k": 0}}, "k is from 1"),
        ({"settings": {"k": 257}, "keys": "round"}, "k is from 1 to 256"),
        ({"origins": 2}, "one origin"),
        ({"epoch_rounds": 19}, "the mask changes after 19"),
        ({"segments": (SegmentSpec("shared", 2), SegmentSpec("cluster", 4))}, "no shared segment"),
    ],
)
def test_plans_that_make_no_sense_are_refused(changes, reason):
    with pytest.raises(ConfigError, match=reason):
        Rounds(run_plan("fesem", **changes), DEVICES)
