"""FedGroup's auxiliary model: the mean of the groups' models, which devices of no group end with."""

import numpy as np
import pytest

from aggregator.rounds.relay import numbers_in
from aggregator.strategies.base import ClusterModel
from tests.unit.aggregator.strategies.fedgroup.test_intergroup import DEVICES, World


def check_mean(world):
    state = world.rounds.state
    mean = np.mean([world.theta(j) for j in range(2)], axis=0)
    np.testing.assert_allclose(world.rounds.theta(state.auxiliary), mean, rtol=1e-5, atol=1e-5)


def test_before_cold_start_it_is_the_origin():
    world = World()
    assert world.rounds.state.auxiliary == ClusterModel()
    assert world.rounds.strategy.models_of(world.rounds.state) == {}


@pytest.mark.parametrize("eta", [0.0, 0.2], ids=["groups alone", "models added up"])
def test_it_is_mean_of_groups_in_every_round(eta):
    world = World(eta)
    for _ in range(5):
        world.step()
        check_mean(world)


def test_it_counts_group_that_has_not_moved():
    world = World(0.0)
    world.step()
    world.step(present=[d for d, group in world.rounds.state.clusters.items() if group == 1])
    assert [s.version for s in world.rounds.state.slots] == [1, 2]
    check_mean(world)


def test_last_round_gives_the_mean():
    """The last round gives it a state with the mean of the groups means."""
    world = World(0.0)
    world.step()
    state, plan = world.rounds.strategy.plan(world.rounds.state, 2, DEVICES)
    world.rounds.plan = plan
    given = sorted((world.answer(d, o, 2) for d, o in plan.assignments.items()), key=lambda c: c.device)
    state, _ = world.rounds.strategy.close(state, plan, given)
    auxiliary = world.rounds.strategy.models_of(state)[2]
    np.testing.assert_allclose(auxiliary.offset, np.mean([s.offset for s in state.slots], axis=0), rtol=1e-6)
    assert (auxiliary.contributors, auxiliary.version) == (min(s.contributors for s in state.slots), 2)
    assert numbers_in(auxiliary) == numbers_in(state.slots)
