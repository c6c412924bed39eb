"""Local training: one model a device, nobody's update in another's."""

import numpy as np
import pytest

from aggregator.rounds.relay import numbers_in
from aggregator.strategies.base import ClusterModel
from shoal.errors import ConfigError
from tests.helpers.plans import D, Rounds, contribution, run_plan

DEVICES = ("dev-b", "dev-a", "dev-c")
RNG = np.random.default_rng(1)
VECTORS = {d: RNG.standard_normal(D).astype(np.float32) for d in (*DEVICES, "dev-0")}


def answer(device, assignment, round_):
    (model,) = assignment.candidates
    return contribution(device, VECTORS[device], round=round_, model=model)


def test_every_device_keeps_its_own_sum():
    """A newcomer gets a model of its own and shifts nobody."""
    rounds = Rounds(run_plan("local"), DEVICES).after(answer)
    outcome = rounds.step(answer, present=("dev-a", "dev-c", "dev-0"))
    assert outcome.clusters == {"dev-a": 0, "dev-b": 1, "dev-c": 2, "dev-0": 3}
    for device, times in {"dev-a": 2, "dev-b": 1, "dev-c": 2, "dev-0": 1}.items():
        model = rounds.theta(rounds.state.slots[outcome.clusters[device]])
        np.testing.assert_allclose(model, VECTORS[device] * times)


def test_in_end_everybody_has_its_own_model():
    rounds = Rounds(run_plan("local"), DEVICES).after(answer)
    assert {slot.version for slot in rounds.state.slots} == {1}
    assert 0 in numbers_in(rounds.state), "the origin stays in use for newcomers"
    plan = rounds.strategy.final(rounds.state, 21, ("dev-0", "dev-c"))
    assert (plan.assignments["dev-c"].candidates, plan.models[2]) == ((2,), rounds.state.slots[2])
    assert plan.models[plan.assignments["dev-0"].candidates[0]] == ClusterModel()


def test_only_drawn_models_are_named():
    """Partial participation names only the models of those drawn."""
    strategy = Rounds(run_plan("local", participation=0.34), DEVICES).strategy
    _, plan = strategy.plan(strategy.init(DEVICES), 1, tuple(sorted(DEVICES)))
    assert len(plan.assignments) == len(plan.models) == 1


def test_a_mean_of_one_must_be_allowed():
    with pytest.raises(ConfigError, match="at least 3") as caught:
        Rounds(run_plan("local", min_contributors=3), DEVICES)
    assert "--min-contributors 1" in caught.value.hint
