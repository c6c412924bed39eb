"""Devices that train alone: in one training, by the strategy ``local``, and the samples that each is tested on."""

import dataclasses

import numpy as np
import pytest
from shoal_lab.experiments.studies import alone
from shoal_lab.experiments.studies.alone import train_alone

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine.ranks import Ranks
from shoal.simulation.trainers.networks import OneHidden


def shards_of(sizes, seed=0, inputs=9, classes=4):
    rng = np.random.default_rng(seed)
    return tuple(Shard(rng.standard_normal((n, inputs)).astype(np.float32), rng.integers(0, classes, n)) for n in sizes)


def test_both_ways_of_training_alone_agree():
    """One training, and the strategy ``local`` round by round, on shards of different sizes."""
    network = OneHidden(9, 5, 4)
    population = Population(shards_of([6, 6, 8]), test=shards_of([20, 20, 20], seed=1))
    once = LocalTraining(epochs=0, steps=3, batch_size=0, lr=0.2)
    rounds = dataclasses.replace(once, momentum=1e-9)
    fast, whole = (train_alone(population, network, r, rounds=7, seed=2) for r in (once, rounds))
    np.testing.assert_allclose(fast.losses, whole.losses, atol=1e-5)
    np.testing.assert_allclose(fast.accuracies, whole.accuracies, atol=0.1)


@pytest.mark.parametrize("momentum", [0.0, 0.5], ids=["once", "strategy"])
def test_each_rank_trains_some_devices(monkeypatch, momentum):
    """Three ranks together have the results of a single process; the third has no device."""
    network = OneHidden(9, 5, 4)
    population = Population(shards_of([6, 8]), test=shards_of([20, 20], seed=1))
    local = LocalTraining(epochs=0, steps=3, batch_size=0, lr=0.2, momentum=momentum)
    whole = train_alone(population, network, local, rounds=4, seed=2)
    together = np.full((2, 2), np.nan)

    class Third(Ranks):
        def rows(self, own, parts):
            together[parts[self.rank]] = own
            return together

    for rank in range(3):
        monkeypatch.setattr(alone, "current_ranks", lambda rank=rank: Third(rank, 3))
        train_alone(population, network, local, rounds=4, seed=2)
    np.testing.assert_allclose(together, np.column_stack((whole.accuracies, whole.losses)), rtol=1e-6)


def test_other_groups_probes_do_not_count():
    """With inverted labels in the second group, a device's accuracy is high only on its own group's probes."""
    rng = np.random.default_rng(0)

    def shard(n, group):
        y = rng.integers(0, 2, n)
        x = rng.normal(0, 0.1, (n, 3)).astype(np.float32)
        x[:, 0] += np.where(y == group, 1.0, -1.0)
        return Shard(x, y)

    population = Population(
        tuple(shard(20, g) for g in (0, 1)),
        groups=(0, 1),
        probes=tuple(shard(50, g) for g in (1, 0, 0)),
        probe_groups=(1, 0, 0),
    )
    seen = []
    recipe = LocalTraining(epochs=0, steps=20, batch_size=0, lr=0.5)
    ended = train_alone(population, OneHidden(3, 8, 2), recipe, rounds=5, seed=0, told=seen.append)
    assert (ended.accuracies > 95).all()
    assert seen == [1, 2]


ONE_STEP = LocalTraining(epochs=0, steps=1, batch_size=0, lr=0.2)


def test_no_test_samples_no_accuracy():
    """It is NaN, and the others have theirs; training goes on."""
    population = Population(shards_of([6, 6]), test=(Shard.none(), *shards_of([5], seed=1)))
    ended = train_alone(population, OneHidden(9, 5, 4), ONE_STEP, rounds=1, seed=0)
    assert np.isnan(ended.accuracies).tolist() == [True, False]
    assert np.isfinite(ended.losses).all()


def test_no_probes_no_accuracy():
    population = Population(shards_of([6, 6]), groups=(0, 1), probes=shards_of([5], seed=1), probe_groups=(1,))
    ended = train_alone(population, OneHidden(9, 5, 4), ONE_STEP, rounds=1, seed=0)
    assert np.isnan(ended.accuracies).tolist() == [True, False]


def test_devices_learn_nothing_from_others():
    """A device's model is the same whether others train beside it or not."""
    shards = shards_of([6, 6, 8])
    tests = shards_of([20] * 3, seed=1)
    network = OneHidden(9, 5, 4)
    together = train_alone(Population(shards, test=tests), network, ONE_STEP, rounds=5, seed=2)
    for i in range(3):
        own = train_alone(Population(shards[i : i + 1], test=tests[i : i + 1]), network, ONE_STEP, rounds=5, seed=2)
        assert own.losses[0] == pytest.approx(together.losses[i], abs=1e-5)
        assert own.accuracies[0] == together.accuracies[i]
