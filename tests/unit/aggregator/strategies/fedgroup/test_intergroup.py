"""Inter-group aggregation (fedgroup Alg. 2, lines 16 to 19) against whole models in the clear."""

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel
from aggregator.strategies.fedgroup.strategy import MAX_SCALE, aggregate, length_after
from shoal.errors import IntegrityError, WireError
from shoal.protocol.messages import Phase
from shoal.protocol.states import Term
from tests.helpers.plans import D, Rounds, contribution, run_plan

DEVICES = tuple(f"dev-{i}" for i in range(6))
TRUTH = {d: i % 2 for i, d in enumerate(DEVICES)}
ETA = 0.3
RNG = np.random.default_rng(31)
ORIGIN = RNG.standard_normal(D)
GOALS = RNG.standard_normal((2, D)) * 4
SAMPLES = {d: 10 * (i + 1) for i, d in enumerate(DEVICES)}


def theta(slot):
    """Return the whole model of a slot, float64."""
    return slot.scale * ORIGIN + (0 if slot.offset is None else slot.offset.astype(np.float64))


class World:
    """Devices that hold the origin and train towards their group's goal; an oracle that adds whole models up."""

    def __init__(self, eta=ETA):
        run = run_plan("fedgroup", {"groups": 2, "alpha": 3, "eta_g": eta, "rac": "off"})
        self.rounds = Rounds(run, DEVICES, origins=[ORIGIN])
        self.weights = []

    def theta(self, j):
        """Return a group's model, (D,) float64."""
        return self.rounds.theta(self.rounds.state.slots[j])

    def step(self, answer=None, present=DEVICES):
        """Do one round; ``weights`` has the sum of the weights of each new state's recipe."""
        outcome = self.rounds.step(answer or self.answer, present)
        self.weights = [sum(weight for weight, _ in step.terms) for step in self.rounds.steps]
        return outcome

    def answer(self, device, assignment, round_):
        (model,) = assignment.candidates
        start = self.rounds.theta(self.rounds.plan.models[model])
        delta = 0.5 * (GOALS[TRUTH[device]] - start) + 0.1 * np.sin(np.arange(D) + len(device) + SAMPLES[device])
        delta = delta.astype(np.float32)
        norm = float(np.linalg.norm(start + delta)) if assignment.norm else 0.0
        return contribution(
            device,
            delta,
            round=round_,
            model=model,
            phase=Phase(assignment.phase),
            samples=SAMPLES[device],
            model_norm=norm,
        )


def test_the_length_after_the_mean_is_exact():
    """From the devices' lengths alone: nobody ever measures the mean model."""
    before = ClusterModel(0, RNG.standard_normal(D).astype(np.float32), 3, 1, 1.7)
    given, trained = [], []
    for device in DEVICES:
        delta = RNG.standard_normal(D).astype(np.float32)
        trained.append(theta(before) + delta)
        made = contribution(device, delta, samples=SAMPLES[device], model_norm=float(np.linalg.norm(trained[-1])))
        given.append(made)
    weights = [SAMPLES[d] for d in DEVICES]
    after = before.moved(np.average([c.vector for c in given], 0, weights).astype(np.float32), 6, 2)
    expected = np.linalg.norm(np.average(trained, 0, weights))
    assert length_after(given, before, after, "samples") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("lie", [1e-30, 1e-3, 1e3, 3.4e38])
def test_one_false_length_is_bounded(lie):
    """One false length moves that of its group by no more than updates are long."""
    start = 10.0 * RNG.standard_normal(D)
    before = ClusterModel(0, start.astype(np.float32), 3, 1, 0.0)
    deltas = [RNG.standard_normal(D).astype(np.float32) for _ in DEVICES]
    lengths = [float(np.linalg.norm(start + delta)) for delta in deltas]
    for liar in (0, len(DEVICES) - 1):
        told = [lie if i == liar else length for i, length in enumerate(lengths)]
        given = [contribution(d, v, model_norm=n) for d, v, n in zip(DEVICES, deltas, told, strict=True)]
        found = length_after(given, before, before.moved(np.mean(deltas, 0), 6, 2), "uniform")
        assert abs(found - np.linalg.norm(start)) < 2 * max(np.linalg.norm(delta) for delta in deltas)


def test_whole_models_are_added():
    """Whole models are added though only scales and means are held."""
    world = World()
    world.step()
    for _ in range(3):
        seen = {}

        def spy(device, assignment, round_, seen=seen):
            seen[device] = world.answer(device, assignment, round_)
            return seen[device]

        before = [world.theta(j) for j in range(2)]
        world.step(spy)
        middle = []
        for j in range(2):
            mine = [c for c in seen.values() if c.model == j]
            middle.append(before[j] + np.average([c.vector for c in mine], 0, [c.samples for c in mine]))
        for j in range(2):
            other = middle[1 - j]
            np.testing.assert_allclose(world.theta(j), middle[j] + ETA * other / np.linalg.norm(other), atol=2e-5)
        assert len(world.weights) == 2
        assert min(world.weights) > 1
    assert [s.version for s in world.rounds.state.slots] == [4, 4]


def test_unknown_length_adds_to_nobody():
    """A group of unknown length adds to no other."""
    slots = (ClusterModel(0, np.ones(D, np.float32), 5, 1), ClusterModel(0, np.full(D, 2, np.float32), 3, 1))
    first, second = aggregate(slots, (2.0, 0.0), 0.5, 2)
    assert first is slots[0]
    assert (second.scale, second.contributors, second.version) == (1.25, 3, 2)
    np.testing.assert_allclose(second.offset, 2 + 0.25)


def test_absurd_length_adds_to_nobody():
    """A recipe has no room for the weight that would follow."""
    slots = (ClusterModel(0), ClusterModel(1))
    first, second = aggregate(slots, (2.0, 3.4e38), 0.5, 2)
    assert first is slots[0]
    assert second.others == ((0.25, 0),)


def test_models_at_the_origin_change_scale():
    """Models at the origin change their scale only."""
    first, second = aggregate((ClusterModel(), ClusterModel()), (2.0, 4.0), 1.0, 3)
    assert (first.scale, second.scale) == (1.25, 1.5)
    assert first.offset is second.offset is None


def test_empty_group_has_its_last_length():
    """An empty group counts with its last length."""
    world = World()
    world.step()
    world.step()
    lengths = world.rounds.state.lengths
    assert all(lengths)
    only = tuple(d for d in DEVICES if world.rounds.state.clusters[d] == 0)
    before = world.theta(1)
    world.step(present=only)
    assert world.rounds.state.lengths[1] == lengths[1]
    assert not np.array_equal(world.theta(1), before)


def test_length_that_is_missing_is_an_error():
    with pytest.raises(IntegrityError, match="did not report"):
        length_after([contribution("dev-0", np.ones(D))], ClusterModel(), ClusterModel(), "samples")


def test_no_length_is_asked_for_without_it():
    """Nobody is asked for a length without it."""
    strategy = Rounds(run_plan("fedgroup", {"groups": 2, "alpha": 3}), DEVICES).strategy
    rounds = World().rounds
    rounds.step(lambda d, _o, r: contribution(d, GOALS[TRUTH[d]], round=r, model=3, phase=Phase.PRETRAIN))
    asked = {o.norm for o in rounds.strategy.plan(rounds.state, 2, DEVICES)[1].assignments.values()}
    silent = {o.norm for o in strategy.plan(rounds.state, 2, DEVICES)[1].assignments.values()}
    assert (asked, silent) == ({True}, {False})


def test_a_bound_is_what_devices_check():
    assert Term(0, 0, MAX_SCALE).weight == MAX_SCALE
    with pytest.raises(WireError, match="a weight of"):
        Term(0, 0, 1.001 * MAX_SCALE)


@pytest.mark.parametrize("lie", [1e-100, 1e-7])
def test_vanished_length_ruins_no_model(lie):
    """The sums that no device would take are not made; the groups go on from their own, and from the lengths before."""
    world = World()
    for _ in range(2):
        world.step()
    state, liars = world.rounds.state, tuple(d for d in DEVICES if world.rounds.state.clusters[d] == 1)

    def answer(device, assignment, round_):
        given = world.answer(device, assignment, round_)
        if device not in liars:
            return given
        return contribution(device, np.zeros(D), round=round_, model=given.model, model_norm=lie)

    outcome = world.step(answer)
    (refused,) = [e for e in outcome.events if e.kind == "intergroup-refused"]
    assert min(refused.detail["lengths"]) == pytest.approx(lie)
    assert (world.rounds.state.lengths, set(world.weights)) == (state.lengths, {1.0})
    assert all(np.isfinite(world.theta(j)).all() for j in range(2))
    assert not [e for e in world.step().events if e.kind == "intergroup-refused"]
    assert min(world.weights) > 1
