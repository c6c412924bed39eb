"""The dealing of images: shares, label mixes, shifts by group, faults, and data that change."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from shoal_lab.experiments.wild import images
from shoal_lab.experiments.wild.scenarios import NO_GROUP, SCENARIOS, Scenario

from shoal.errors import UsageError

PLAIN = Scenario(kind="none", title="", groups=(0, 0, 1), samples=20)


@pytest.fixture
def deal(bars):
    def made(scenario=PLAIN, **changes):
        options = {"seed": 0, "data_dir": bars, "samples": None, "test_images": 12, **changes}
        return images.deal(scenario, **options)

    return made


def shift(name, group, **changes):
    """Return two images, and labels 0 to 2, after a shift."""
    x = np.linspace(0, 1, 3 * 196, dtype=np.float32).reshape(3, 14, 14)
    scenario = dataclasses.replace(PLAIN, shift=name, **changes)
    return x, *images.shifted(scenario, group, x, np.array([0, 1, 2]), np.random.default_rng(0), 5)


def test_a_device_has_shares_and_fresh_tests(deal):
    population = deal().population
    assert [len(s) for s in population.train] == [12] * 3
    assert [len(s) for s in population.validation] == [4] * 3
    assert [s.x.shape for s in population.test] == [(12, 196)] * 3
    assert sorted(population.groups) == [0, 0, 1]
    assert population.train[0].x.dtype == np.float32
    assert population.train[0].x.max() <= 1
    own = {image.tobytes() for share in (*population.train, *population.validation) for image in share.x}
    assert not own & {image.tobytes() for share in population.test for image in share.x}


def test_the_seed_decides_everything(deal):
    first, again, other = (deal(seed=seed).population for seed in (0, 0, 1))
    assert np.array_equal(first.test[2].x, again.test[2].x)
    assert not np.array_equal(first.train[0].x, other.train[0].x)


def test_devices_may_have_unequal_images(deal):
    unequal = dataclasses.replace(PLAIN, samples=(10, 20, 30))
    assert [len(s) for s in deal(unequal).population.train] == [6, 12, 18]
    assert [len(s) for s in deal(unequal, samples=10).population.train] == [6] * 3
    with pytest.raises(UsageError, match="4 images for a device"):
        deal(samples=4)


def test_label_mixes(deal):
    some = deal(dataclasses.replace(PLAIN, labels=2, samples=60)).population
    assert all(len(set(np.concatenate([a.y, b.y]))) <= 2 for a, b in zip(some.train, some.test, strict=True))
    skewed = deal(dataclasses.replace(PLAIN, dirichlet=0.05, samples=60)).population
    assert max(np.bincount(skewed.train[0].y)) > 18


def test_quarter_turns():
    x, turned, y = shift("rotated", 1)
    assert np.array_equal(turned, np.rot90(x, 1, axes=(1, 2)))
    assert y.tolist() == [0, 1, 2]


def test_labels_are_swapped_or_permuted():
    """Permuted labels are the group's own; an unknown shift is refused."""
    pairs = ((0, 0), (0, 2))
    assert shift("swapped", 0, pairs=pairs)[2].tolist() == [0, 1, 2]
    assert shift("swapped", 1, pairs=pairs)[2].tolist() == [2, 1, 0]
    with pytest.raises(UsageError, match="no shift 'x'"):
        shift("x", 0)
    assert shift("permuted", 0)[2].tolist() == [0, 1, 2]
    labels = [shift("permuted", group)[2].tolist() for group in (1, 1, 2)]
    assert labels[0] == labels[1] != labels[2]


@pytest.mark.parametrize("name", ["turned", "features", "background", "dimmed", "rotated"])
def test_shifts_keep_labels_and_range(name):
    for group in (1, 2, 3):
        x, moved, y = shift(name, group, degrees=15)
        assert moved.shape == x.shape
        assert moved.dtype == np.float32
        assert not np.array_equal(moved, x)
        assert y.tolist() == [0, 1, 2]
    assert name == "background" or np.array_equal(*shift(name, 0, degrees=15)[:2])


def test_faulty_devices_have_random_labels(deal):
    sound, faulty = deal(), deal(dataclasses.replace(PLAIN, faulty=1))
    (place,) = [i for i, g in enumerate(faulty.population.groups) if g == NO_GROUP]
    assert np.array_equal(sound.population.train[place].x, faulty.population.train[place].x)
    assert not np.array_equal(sound.population.train[place].y, faulty.population.train[place].y)
    noisy = deal(dataclasses.replace(PLAIN, faulty=1, noise=True)).population
    assert noisy.train[place].x.mean() == pytest.approx(0.5, abs=0.05)
    assert np.array_equal(sound.population.train[place].y, noisy.train[place].y)


def test_later_data_are_the_same_images(deal):
    moved = dataclasses.replace(PLAIN, shift="rotated", groups=(0, 1, 1), later=(1, 1, 0))
    fleet = deal(moved)
    assert (fleet.population.groups, fleet.last.groups) == ((0, 1, 1), (1, 1, 0))
    before, after = (p.train[0].x.reshape(-1, 14, 14) for p in (fleet.population, fleet.last))
    assert np.array_equal(after, np.rot90(before, 1, axes=(1, 2)))


def test_every_mnist_scenario_can_be_dealt(deal):
    for scenario in SCENARIOS.values():
        if scenario.data == "mnist":
            fleet = deal(scenario, samples=5, test_images=1)
            assert len(fleet.population) == len(scenario.groups)
            assert fleet.network.length == images.NETWORKS[scenario.network].length
