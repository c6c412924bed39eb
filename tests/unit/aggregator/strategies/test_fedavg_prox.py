"""FedProx is FedAvg whose devices have a proximal term, and refuses to be less."""

import dataclasses

import numpy as np
import pytest

from shoal.errors import ConfigError
from tests.helpers.plans import FULL_BATCH, D, Rounds, contribution, run_plan

PROXIMAL = dataclasses.replace(FULL_BATCH, prox_mu=0.1)


def test_aggregator_does_what_fedavg_does():
    rng = np.random.default_rng(0)
    vectors = {d: rng.standard_normal(D).astype(np.float32) for d in ("dev-1", "dev-2")}
    models = []
    for algorithm in ("fedavg", "fedprox"):
        rounds = Rounds(run_plan(algorithm, local=PROXIMAL), vectors)
        for _ in range(2):
            rounds.step(lambda device, _order, round_: contribution(device, vectors[device], round=round_))
        models.append(rounds.theta(rounds.state.slot).tobytes())
    assert models[0] == models[1]


@pytest.mark.parametrize("algorithm", ["fedprox", "fedgrouprox"])
def test_missing_proximal_term_is_refused(algorithm):
    """Without a proximal term the plan is refused."""
    with pytest.raises(ConfigError, match="prox_mu is 0") as caught:
        Rounds(run_plan(algorithm), ("dev-1",))
    assert "--local prox_mu" in caught.value.hint
    assert Rounds(run_plan(algorithm, local=PROXIMAL), ("dev-1",)).strategy.name == algorithm
