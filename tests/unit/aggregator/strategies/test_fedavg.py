"""FedAvg against the formula: Eq. 3 of the FedGroup paper on plain numpy.

FedProx is FedAvg whose devices have a proximal term, and refuses to be less.
"""

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel
from shoal.errors import ConfigError
from tests.helpers.plans import FULL_BATCH, D, Rounds, contribution, run_plan

DEVICES = ("dev-1", "dev-2", "dev-3")
RNG = np.random.default_rng(3)
VECTORS = {d: RNG.standard_normal(D).astype(np.float32) for d in DEVICES}
SAMPLES = {"dev-1": 10, "dev-2": 30, "dev-3": 60}


def answer(device, assignment, round_):
    assert assignment.candidates == (0,)
    assert assignment.train
    return contribution(device, VECTORS[device] * round_, round=round_, samples=SAMPLES[device])


@pytest.mark.parametrize(("weighting", "weights"), [("samples", [0.1, 0.3, 0.6]), ("uniform", [1 / 3, 1 / 3, 1 / 3])])
def test_model_moves_by_the_weighted_means(weighting, weights):
    rounds = Rounds(run_plan(weighting=weighting), DEVICES).after(answer, 3)
    mean = sum(w * VECTORS[d].astype(np.float64) for w, d in zip(weights, DEVICES, strict=True))
    slot = rounds.state.slot
    np.testing.assert_allclose(rounds.theta(slot), mean * 6, rtol=1e-5)
    assert (rounds.contributors(slot), slot.version) == (3, 3)


def test_too_few_leave_the_model():
    """Too few contributors leave the model as it was."""
    rounds = Rounds(run_plan(min_contributors=3), DEVICES).after(answer, present=("dev-1", "dev-2"))
    assert rounds.state.slot == ClusterModel()
    rounds.step(answer)
    assert rounds.state.slot.version == 2


def test_round_without_answers():
    """A round without answers changes nothing."""
    rounds = Rounds(run_plan(), DEVICES).after(answer)
    before = rounds.state
    outcome = rounds.step(lambda *_: None)
    assert rounds.state == before
    assert outcome.clusters == dict.fromkeys(DEVICES, 0)


def test_evaluation_every_nth_round():
    """Evaluation is ordered in every nth round."""
    strategy = Rounds(run_plan(evaluate_every=3), DEVICES).strategy
    asked = [strategy.plan(strategy.init(DEVICES), r, DEVICES)[1].assignments["dev-1"].evaluate for r in range(1, 7)]
    assert asked == [False, False, True, False, False, True]


PROXIMAL = dataclasses.replace(FULL_BATCH, prox_mu=0.1)


@pytest.mark.parametrize("algorithm", ["fedprox", "fedgrouprox"])
def test_missing_proximal_term_is_refused(algorithm):
    """Without a proximal term the plan is refused."""
    with pytest.raises(ConfigError, match="prox_mu is 0") as caught:
        Rounds(run_plan(algorithm), ("dev-1",))
    assert "--local prox_mu" in caught.value.hint
    assert Rounds(run_plan(algorithm, local=PROXIMAL), ("dev-1",)).strategy.name == algorithm
