"""FedGroup's auxiliary model: the mean of the groups' models, which devices of no group end with."""

import numpy as np
import pytest

from aggregator.rounds.relay import numbers_in
from aggregator.strategies.base import ClusterModel
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import Phase
from tests.helpers.plans import Rounds, contribution, run_plan

D = 10
DEVICES = tuple(f"dev-{i:02d}" for i in range(8))
RNG = np.random.default_rng(6)
CENTRES = 5.0 * RNG.standard_normal((2, D))
GOALS = {d: CENTRES[i % 2] + 0.2 * RNG.standard_normal(D) for i, d in enumerate(DEVICES)}
ORIGIN = RNG.standard_normal(D)


class World:
    """Devices that walk half-way to their goals."""

    def __init__(self, **settings):
        run = run_plan("fedgroup", {"groups": 2, "alpha": 4, **settings}, segments=(SegmentSpec("cluster", D),))
        self.rounds = Rounds(run, DEVICES, origins=[ORIGIN])

    def answer(self, device, assignment, round_):
        model = assignment.candidates[0]
        theta = self.rounds.theta(self.rounds.plan.models[model])
        delta = 0.5 * (GOALS[device] - theta)
        norm = float(np.linalg.norm(theta + delta)) if assignment.norm else 0.0
        phase = Phase(assignment.phase)
        return contribution(device, delta, round=round_, model=model, phase=phase, model_norm=norm)

    def step(self, present=DEVICES):
        return self.rounds.step(self.answer, present)

    def check_mean(self):
        state = self.rounds.state
        mean = np.mean([self.rounds.theta(s) for s in state.slots], axis=0)
        np.testing.assert_allclose(self.rounds.theta(state.auxiliary), mean, rtol=1e-5, atol=1e-5)


def test_before_cold_start_it_is_the_origin():
    world = World()
    assert world.rounds.state.auxiliary == ClusterModel()
    assert world.rounds.strategy.models_of(world.rounds.state) == {}


@pytest.mark.parametrize("settings", [{}, {"eta_g": 0.2}], ids=["groups alone", "models added up"])
def test_it_is_mean_of_groups_in_every_round(settings):
    world = World(**settings)
    for _ in range(5):
        world.step()
        world.check_mean()


def test_it_counts_group_that_has_not_moved():
    world = World()
    world.step()
    world.step([d for d, group in world.rounds.state.clusters.items() if group == 1])
    assert [s.version for s in world.rounds.state.slots] == [1, 2]
    world.check_mean()


def test_last_round_gives_the_mean():
    """The last round gives it a state with the mean of the groups means."""
    world = World()
    world.step()
    state, plan = world.rounds.strategy.plan(world.rounds.state, 2, DEVICES)
    world.rounds.plan = plan
    given = sorted((world.answer(d, o, 2) for d, o in plan.assignments.items()), key=lambda c: c.device)
    state, _ = world.rounds.strategy.close(state, plan, given)
    auxiliary = world.rounds.strategy.models_of(state)[2]
    np.testing.assert_allclose(auxiliary.offset, np.mean([s.offset for s in state.slots], axis=0), rtol=1e-6)
    assert (auxiliary.contributors, auxiliary.version) == (min(s.contributors for s in state.slots), 2)
    assert numbers_in(auxiliary) == numbers_in(state.slots)
