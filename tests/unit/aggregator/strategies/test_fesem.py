"""FeSEM against k-means written out on whole models, origin and all."""

import numpy as np
import pytest

from aggregator.rounds.relay import is_state
from aggregator.strategies.base import ClusterModel
from edge_client.learning.scoring import nearest_model
from shoal.errors import ConfigError
from shoal.protocol.documents import SegmentSpec
from tests.helpers.plans import D, Rounds, contribution, run_plan

DEVICES = tuple(f"dev-{i}" for i in range(8))
RNG = np.random.default_rng(11)
GOALS = RNG.standard_normal((2, D)).astype(np.float32) * 4
GOAL = {d: GOALS[i % 2] + 0.1 * RNG.standard_normal(D).astype(np.float32) for i, d in enumerate(DEVICES)}
SAMPLES = {d: 10 * (i + 1) for i, d in enumerate(DEVICES)}


class World:
    """Devices that hold the centres and walk a part of the way from theirs to their goal; keeps the trained models.

    Args:
        pull: the part.
        changes: of the plan.
    """

    def __init__(self, pull=0.8, **changes):
        origin = np.random.default_rng(12).standard_normal(D)
        plan = run_plan("fesem", **{"settings": {"k": 2}, **changes})
        self.rounds = Rounds(plan, DEVICES, origins=[origin])
        self.pull = pull
        self.models = {}

    def theta(self, j):
        return self.rounds.theta(self.rounds.state.slots[j])

    def answer(self, device, assignment, round_):
        assert assignment.compare == (0, 1)
        (own,) = assignment.candidates
        centres = {j: self.theta(j).astype(np.float32) for j in assignment.compare}
        delta = (self.pull * (GOAL[device] - self.theta(own))).astype(np.float32)
        self.models[device] = self.theta(own) + delta
        nearest = nearest_model(own, delta, assignment.compare, centres)
        return contribution(device, delta, round=round_, model=own, samples=SAMPLES[device], nearest=nearest)

    def step(self, present=DEVICES):
        self.models.clear()
        return self.rounds.step(self.answer, present)


@pytest.fixture
def world():
    return World()


def test_round_is_a_step_of_k_means(world):
    """Each round is one step of k means on the trained models."""
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
    clusters = world.step().clusters
    assert {clusters[d] for d in DEVICES[::2]} ^ {clusters[d] for d in DEVICES[1::2]} == {0, 1}
    assert any(e.kind == "reassigned" for e in world.rounds.events)


def test_first_assignment_is_random_and_even():
    seen = set()
    for seed in range(6):
        clusters = Rounds(run_plan("fesem", {"k": 3}, seed=seed), DEVICES).state.clusters
        assert sorted(np.bincount(list(clusters.values()))) == [2, 3, 3]
        seen.add(tuple(clusters.values()))
    assert len(seen) > 3


def test_centre_is_mean_of_starting_models(world):
    """Weights of a recipe add up to 1, and no vector outlives the round."""
    mixed = []
    for _ in range(4):
        world.step()
        assert all(is_state(slot) for slot in world.rounds.state.slots)
        for step in world.rounds.steps:
            assert sum(weight for weight, _ in step.terms) == pytest.approx(1.0, abs=1e-12)
            mixed.append(len(step.terms))
    assert set(mixed) == {1, 2}
    world.rounds.reload()
    assert not world.rounds.reload().arrays


def test_mixed_centre_is_left_out():
    """The distance to a mixed centre is left out of the discrepancy."""
    world = World(settings={"k": 2, "discrepancy": "on"})
    kinds = set()
    for _ in range(4):
        outcome = world.step()
        (found,) = (frozenset(e.detail) for e in outcome.events if e.kind == "discrepancy")
        kinds.add((max(len(step.terms) for step in world.rounds.steps), "mean_after" in found))
    assert kinds == {(1, True), (2, False)}


def test_absent_device_keeps_its_centre(world):
    """Whoever is away keeps its centre and an empty centre its model."""
    world.step()
    clusters = dict(world.rounds.state.clusters)
    away = {d for d, j in clusters.items() if j == 1}
    kept = world.rounds.state.slots[1]
    world.pull = 0.0
    assert world.step(tuple(d for d in DEVICES if d not in away)).clusters == clusters
    assert world.rounds.state.slots[1] is kept


def test_a_centre_of_too_few_keeps_its_model():
    world = World(min_contributors=5)
    world.step()
    assert world.rounds.state.slots == (ClusterModel(), ClusterModel())


def test_newcomers_are_assigned_at_once(world):
    """Newcomers are assigned when they come."""
    world.step(DEVICES[:6])
    state, plan = world.rounds.strategy.plan(world.rounds.state, 2, (*DEVICES, "dev-9"))
    assert plan.assignments["dev-9"].candidates == (state.clusters["dev-9"],)


def test_unknown_device_takes_least_loss(world):
    """In the end an unknown device takes the model of least loss."""
    world.step()
    plan = world.rounds.strategy.final(world.rounds.state, 21, ("dev-0", "stranger"))
    assert plan.assignments["stranger"].candidates == (0, 1)
    assert plan.assignments["dev-0"].candidates == (world.rounds.state.clusters["dev-0"],)


def test_the_discrepancy_is_told_when_asked():
    rounds = Rounds(run_plan("fesem", {"discrepancy": "on"}), DEVICES)
    rounds.step(
        lambda d, o, r: contribution(d, np.full(D, 2.0), round=r, model=o.candidates[0], nearest=o.candidates[0])
    )
    (event,) = rounds.events
    assert (event.kind, event.detail["mean"]) == ("discrepancy", pytest.approx(2 * np.sqrt(D)))
    assert event.detail["mean_after"] == pytest.approx(0.0)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"settings": {"k": 0}}, "k is from 1"),
        ({"settings": {"k": 257}}, "k is from 1 to 256"),
        ({"origins": 3}, "fesem begins with 1 models, and the run has 3"),
        ({"segments": (SegmentSpec("shared", 2), SegmentSpec("cluster", 4))}, "no shared segment"),
    ],
)
def test_senseless_plans_are_refused(changes, reason):
    """Plans that make no sense are refused."""
    with pytest.raises(ConfigError, match=reason):
        Rounds(run_plan("fesem", **changes), DEVICES)
