"""Private coordinates of simulated devices: joined and cut they are the same numbers, wherever they stand."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shoal.errors import ConfigError, DataError
from shoal.simulation.data import Population
from shoal.simulation.engine.fleet import sim_options
from shoal.simulation.engine.private import PrivateParts, PrivateStart
from shoal.simulation.engine.simulate import sim_plan, simulate
from shoal.simulation.engine.workforce import Workforce
from shoal.simulation.trainers.networks import origins
from tests.helpers.simulations import FULL, NETWORK, population

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")
OUT = NETWORK.shapes[-1][0]
LAST = PrivateStart(np.arange(NETWORK.length - OUT, NETWORK.length), np.arange(OUT, dtype=np.float32))


@given(st.integers(2, 30).flatmap(lambda n: st.tuples(st.just(n), st.sets(st.integers(0, n - 1), min_size=1))))
def test_joined_and_cut_are_inverse(case):
    length, places = case
    start = PrivateStart(np.array(sorted(places)), np.arange(len(places), dtype=np.float32))
    federated = start.federated(length)
    assert sorted([*federated, *places]) == list(range(length))
    parts = PrivateParts(start, length, 3, CPU)
    whole = torch.randn(2, length)
    models, private = parts.cut(whole)
    assert models.shape == (2, len(federated))
    torch.testing.assert_close(parts.joined(models, private), whole, rtol=0, atol=0)


def test_each_device_keeps_its_own_values():
    parts = PrivateParts(LAST, NETWORK.length, 4, CPU)
    parts.keep(np.array([1, 3]), torch.full((2, OUT), 9.0))
    assert parts.of(np.array([3])).tolist() == [[9.0] * OUT]
    parts.of(np.array([0]))[:] = 5.0
    assert parts.of(np.array([0, 2])).tolist() == [LAST.values.tolist()] * 2


def test_plan_has_federated_values_alone():
    """A plan and its vectors have the federated coordinates alone."""
    plan = sim_plan("fedavg", {}, NETWORK, sim_options(rounds=1, local=FULL, mode="rotation"), private=LAST)
    assert plan.length == NETWORK.length - OUT
    start = origins(NETWORK, 1, 0)
    with pytest.raises(DataError, match="origins of shape"):
        Workforce(population(), NETWORK, plan, start, private=LAST)
    lengths = []

    def watch(seen):
        lengths.extend(len(c.vector) for c in seen.contributions)

    options = sim_options(rounds=2, local=FULL, mode="rotation", robust="off")
    done = simulate("fedavg", {}, population(), NETWORK, options, watch=watch, private=LAST)
    assert set(lengths) == {plan.length}
    assert done.thetas[0].shape == (plan.length,)
    with pytest.raises(ConfigError, match="no single updates"):
        simulate("fedavg", {}, population(), NETWORK, dataclasses.replace(options, deferred=True), private=LAST)


def test_probes_and_checkpoints_are_refused(tmp_path):
    data, options = population(), sim_options(rounds=1, local=FULL, checkpoint=tmp_path / "run")
    with pytest.raises(ConfigError, match="belong to devices"):
        simulate("fedavg", {}, data, NETWORK, options, private=LAST)
    probed = Population(data.train, data.validation, data.test, probes=data.train[:1])
    with pytest.raises(ConfigError, match="belong to devices"):
        simulate("fedavg", {}, probed, NETWORK, sim_options(rounds=1, local=FULL), private=LAST)
