"""Standardised simulations: raw tables train, and the scales are those that devices would have."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from shoal_lab.experiments.wild.runs import fleet_of
from sklearn.datasets import load_breast_cancer
from torch import nn

import shoal
from shoal.errors import UsageError
from shoal.simulation.api.standardisation import scales_of, target_scale
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine.metrics import adjusted_rand

pytestmark = pytest.mark.torch
RNG = np.random.default_rng(3)


def population(*sizes):
    """Return devices with other means of the first feature."""
    shards = []
    for i, n in enumerate(sizes):
        x = (RNG.standard_normal((n, 3)) * [1, 1000, 0] + [i, 5e3, 7]).astype(np.float32)
        shards.append(Shard(x, np.zeros(n, np.int64)))
    return Population(tuple(shards))


def test_local_scales_are_the_devices_own():
    people = population(40, 60)
    scales = scales_of(people, "local", 3.0)
    done = people.scaled(scales)
    for shard in done.train:
        np.testing.assert_allclose(shard.x[:, :2].mean(axis=0), 0, atol=1e-5)
        np.testing.assert_allclose(shard.x[:, :2].std(axis=0), 1, rtol=1e-4)
        assert not shard.x[:, 2].any()
    assert len(done.validation[0]) == 0


def test_federated_scales_are_of_all_samples():
    """Federated scales are those of all samples together."""
    people = population(40, 60, 50)
    scales = scales_of(people, "federated", 3.0)
    assert len(set(scales)) == 1
    together = np.concatenate([shard.x for shard in people.train]).astype(np.float64)
    np.testing.assert_allclose(scales[0].means, together.mean(axis=0), rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(scales[0].deviations[:2], together.std(axis=0)[:2], rtol=1e-3)


def test_many_samples_weigh_the_cap():
    """A device with many samples weighs no more than the cap."""
    people = population(10, 10, 1000)
    capped, free = (scales_of(people, "federated", cap)[0].means[0] for cap in (1.0, 0.0))
    assert capped < 1.3
    assert free > 1.9


def test_without_it_nothing_changes():
    """Without it nothing changes and what makes no sense is refused."""
    people = population(9)
    assert scales_of(people, "off", 0.0) == ()
    assert people.scaled(()) is people
    with pytest.raises(UsageError, match="standardise is 'global'"):
        scales_of(people, "global", 0.0)
    whole = Population((Shard(np.zeros((9, 3), np.int64), np.zeros(9, np.int64)),))
    with pytest.raises(UsageError, match="whole numbers"):
        scales_of(whole, "local", 0.0)
    wide = Population((Shard(np.zeros((2, 20_000), np.float32), np.zeros(2, np.int64)),))
    with pytest.raises(UsageError, match="up to 16384 features") as caught:
        scales_of(wide, "federated", 0.0)
    assert "local" in caught.value.hint


@pytest.mark.parametrize(("standardise", "good"), [("off", False), ("local", True), ("federated", True)])
def test_raw_tables_train(standardise, good):
    """Raw tables train if they are standardised."""
    x, y = load_breast_cancer(return_X_y=True)
    partitions = shoal.split(x, y, "iid", devices=4, seed=1)
    result = shoal.simulate(
        nn.Linear(30, 2), partitions, strategy="fedavg", rounds=10, local={"lr": 0.1}, standardise=standardise
    )
    assert bool(np.mean(result.accuracy) > 0.93) is good
    assert len(result.models) == 1
    inputs, labels = partitions[2]["test"]
    answers = result.models[0](torch.from_numpy(result.standardised(2, inputs))).argmax(1).numpy()
    assert (answers == labels).mean() == pytest.approx(result.accuracy[2])


@pytest.mark.long
@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("name", "least"), [("table-diabetes", 3), ("few-3-3-regression", 2)])
def test_real_tables_group_in_any_unit(name, least, seed):
    """Real tables are grouped alike in any unit."""
    data, found = fleet_of(name, seed, None, None, 1).population, []
    torch.manual_seed(seed)
    model = nn.Linear(data.train[0].x.shape[1], 1)
    for unit in (0.01, 1.0, 100.0):
        shares = {"train": data.train, "validation": data.validation, "test": data.test}
        partitions = [
            {share: (shards[i].x, np.float32(unit) * shards[i].y) for share, shards in shares.items()}
            for i in range(len(data))
        ]
        result = shoal.simulate(
            model, partitions, task="regression", local={"lr": 0.01}, seed=seed, min_contributors=least
        )
        assert adjusted_rand(result.clusters.tolist(), list(data.groups)) == 1.0
        found.append(result.loss / unit**2)
    np.testing.assert_allclose(found[0], found[1], rtol=0.01)
    np.testing.assert_allclose(found[2], found[1], rtol=0.01)


def test_one_device_moves_no_unit():
    """No device alone moves the unit of targets far."""
    rng = np.random.default_rng(0)
    shards = [
        Shard(np.zeros((40, 1), np.float32), (5 + 2 * rng.standard_normal(40)).astype(np.float32)) for _ in range(7)
    ]
    centre, unit = target_scale(Population(tuple(shards)), None)
    shards[0] = Shard(shards[0].x, shards[0].y * np.float32(1e6))
    assert target_scale(Population(tuple(shards)), None) == pytest.approx((centre, unit), rel=0.2)
    assert (centre, unit) == pytest.approx((5, 2), rel=0.2)
    assert target_scale(Population(tuple(shards)), (-4, 0)) == (-2.0, 1.0)
