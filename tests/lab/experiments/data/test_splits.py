"""The papers' splits: assignment of samples, and changes of labels and images."""

from __future__ import annotations

import numpy as np
import pytest
from shoal_lab.experiments.data import splits
from shoal_lab.experiments.data.datasets import Dataset

from shoal.errors import UsageError
from shoal.simulation.shares import statistics

SIDE, TRAIN, TEST = 3, 400, 100


@pytest.fixture(scope="module")
def data():
    """Images whose middle pixel, which no rotation moves, is the sample's number."""
    rng = np.random.default_rng(0)
    x = rng.random((TRAIN + TEST, SIDE, SIDE)).astype(np.float32)
    x[:, 1, 1] = np.arange(TRAIN + TEST)
    y = rng.permutation(np.arange(TRAIN + TEST) % 10).astype(np.int64)
    return Dataset(name="toy", x_train=x[:TRAIN], y_train=y[:TRAIN], x_test=x[TRAIN:], y_test=y[TRAIN:])


def rows(shard):
    """Return which samples a shard holds."""
    return shard.x[:, 4].astype(int)


def all_y(data):
    """Return the true labels, by sample."""
    return np.concatenate([data.y_train, data.y_test])


def held(population, device):
    """Return all of a device's shards."""
    return (population.train[device], population.validation[device], population.test[device])


def test_a_rotation_deals_every_image_once(data):
    """IFCA: each of the four groups re-partitions all images, and turns them."""
    population = splits.rotation(data, devices=40, samples=40, seed=1)
    for group in range(4):
        mine = [s for s, g in zip(population.train, population.groups, strict=True) if g == group]
        assert sorted(np.concatenate([rows(s) for s in mine])) == list(range(TRAIN))
        for shard in mine:
            for row, flat, label in zip(rows(shard), shard.x, shard.y, strict=True):
                assert np.array_equal(flat.reshape(SIDE, SIDE), np.rot90(data.x_train[row], group))
                assert label == data.y_train[row]
    assert {len(s) for s in population.train} == {40}


def test_rotations_have_test_machines(data):
    population = splits.rotation(data, devices=4, samples=25, seed=1, turns=(0, 2))
    assert population.probe_groups == (0,) * 4 + (1,) * 4
    assert not any(map(len, population.test))
    for group, quarters in ((0, 0), (1, 2)):
        mine = [s for s, g in zip(population.probes, population.probe_groups, strict=True) if g == group]
        assert sorted(np.concatenate([rows(s) for s in mine])) == list(range(TRAIN, TRAIN + TEST))
        first = mine[0]
        assert np.array_equal(first.x[3].reshape(SIDE, SIDE), np.rot90(data.x_test[rows(first)[3] - TRAIN], quarters))


def test_impossible_rotations_are_refused(data):
    with pytest.raises(UsageError, match="6 devices can't form 4 rotations"):
        splits.rotation(data, devices=6, samples=10, seed=0)
    with pytest.raises(UsageError, match="need more than the 400 of toy"):
        splits.rotation(data, devices=40, samples=41, seed=0)


def test_each_group_swaps_two_labels(data):
    """CFL's label swap: a group exchanges one pair of labels and no group shares a label with another."""
    population = splits.relabelled(data, "swap", devices=20, samples=20, seed=3)
    truth = all_y(data)
    pairs = {}
    for device, group in enumerate(population.groups):
        for shard in held(population, device):
            for row, label in zip(rows(shard), shard.y, strict=True):
                if label != truth[row]:
                    pairs.setdefault(group, set()).add((int(truth[row]), int(label)))
    assert len(pairs) == 4
    assert all(len(p) == 2 and {(b, a) for a, b in p} == p for p in pairs.values())
    assert len({label for p in pairs.values() for pair in p for label in pair}) == 8


def test_each_group_has_its_permutation(data):
    """CFL's label permutation: all of a group's devices rename the ten labels alike, on training, validation and test."""
    population = splits.relabelled(data, "permutation", devices=8, groups=4, samples=50, seed=3)
    truth = all_y(data)
    names = {}
    for device, group in enumerate(population.groups):
        for shard in held(population, device):
            for row, label in zip(rows(shard), shard.y, strict=True):
                assert names.setdefault((group, int(truth[row])), int(label)) == label
    permutations = [tuple(names[g, c] for c in range(10)) for g in range(4)]
    assert all(sorted(p) == list(range(10)) for p in permutations)
    assert len(set(permutations)) == 4


@pytest.mark.parametrize("how", ["swap", "permutation", "plain"])
def test_samples_are_cut_and_dealt_once(data, how):
    population = splits.relabelled(data, how, devices=20, samples=20, seed=5)
    assert {(len(a), len(b), len(c)) for a, b, c in (held(population, i) for i in range(20))} == {(12, 4, 4)}
    dealt = np.concatenate([rows(s) for i in range(20) for s in held(population, i)])
    assert sorted(dealt) == list(range(TRAIN))


@pytest.mark.parametrize("how", ["swap", "permutation"])
def test_groups_are_equal_and_not_in_order(data, how):
    groups = splits.relabelled(data, how, devices=20, samples=20, seed=5).groups
    assert [groups.count(g) for g in range(4)] == [5] * 4
    assert list(groups) != sorted(groups)


def test_without_groups_nothing_is_renamed(data):
    population = splits.relabelled(data, "plain", devices=5, samples=None, seed=2)
    truth = all_y(data)
    assert set(population.groups) == {0}
    assert all(np.array_equal(s.y, truth[rows(s)]) for i in range(5) for s in held(population, i))
    assert sum(map(len, population.train)) == TRAIN * 6 // 10


def test_too_many_samples_are_refused(data):
    with pytest.raises(UsageError, match="20 devices of 21 samples need more than the 400"):
        splits.relabelled(data, "plain", devices=20, samples=21, seed=0)
    with pytest.raises(UsageError, match="3 devices can't form 4 groups"):
        splits.relabelled(data, "swap", devices=3, samples=4, seed=0)


@pytest.fixture(scope="module")
def many():
    """Enough images for FedGroup's split, all of them flat but for their number and class."""
    y = np.arange(7000, dtype=np.int64) % 10
    x = np.zeros((7000, SIDE, SIDE), np.float32)
    x[:, 1, 1] = np.arange(7000)
    return Dataset(name="toy", x_train=x[:6000], y_train=y[:6000], x_test=x[6000:], y_test=y[6000:])


@pytest.mark.parametrize("classes", [1, 2, 3, 5, 10])
def test_a_device_holds_its_classes_alone(many, classes):
    """User u holds classes u, u + 1, ... modulo 10, nine tenths of them to train on, each sample dealt once at most."""
    population = splits.classes_power_law(many, devices=100, classes=classes, seed=1)
    dealt = []
    for u in range(100):
        train, validation, test = held(population, u)
        labels = np.concatenate([train.y, test.y])
        assert set(labels.tolist()) == {(u + j) % 10 for j in range(classes)}
        assert len(validation) == 0
        assert len(train) == int(0.9 * len(labels) + 1e-9)
        assert len(labels) >= classes * (10 // classes)
        dealt += [train.x[:, 4], test.x[:, 4]]
    dealt = np.concatenate(dealt)
    assert len(np.unique(dealt)) == len(dealt)
    assert len(dealt) > 0.9 * 7000


def test_sizes_follow_a_power_law(many):
    """The largest device has many times the median's samples."""
    figures = statistics(splits.classes_power_law(many, devices=100, seed=0))["samples_a_device"]
    assert figures["max"] > 5 * figures["median"]
    assert figures["min"] >= 10


def test_pixels_are_standardised(data):
    made = splits.standardised(data.x_train)
    pixels = data.x_train.reshape(TRAIN, -1).astype(np.float64) * 255
    expected = (pixels - pixels.mean(0)) / (pixels.std(0) + 0.001)
    assert np.allclose(made, expected, atol=1e-4)
    assert made.dtype == np.float32


def test_an_impossible_power_law_is_refused(many):
    for devices, classes in ((100, 0), (100, 11), (15, 2), (5, 1)):
        with pytest.raises(UsageError, match="take a multiple of 10"):
            splits.classes_power_law(many, devices=devices, classes=classes, seed=0)
    with pytest.raises(UsageError, match="need more images"):
        splits.classes_power_law(many, devices=1000, classes=2, seed=0)


@pytest.mark.parametrize(
    "deal",
    [
        lambda d, s: splits.rotation(d, devices=8, samples=20, seed=s),
        lambda d, s: splits.relabelled(d, "swap", devices=8, samples=20, seed=s),
        lambda d, s: splits.relabelled(d, "permutation", devices=8, samples=20, seed=s),
        lambda d, s: splits.classes_power_law(d, devices=10, classes=2, seed=s),
    ],
)
def test_the_seed_decides_everything(data, deal):
    one, again, other = (deal(data, s) for s in (7, 7, 8))
    assert one.groups == again.groups
    assert all(
        np.array_equal(a.x, b.x) and np.array_equal(a.y, b.y) for a, b in zip(one.train, again.train, strict=True)
    )
    assert not all(np.array_equal(a.x, b.x) for a, b in zip(one.train, other.train, strict=True))
