"""Deal MNIST or Fashion-MNIST to the devices of a scenario: 14 x 14 pixels, shifted by group, with each device's own label mix.

All 70,000 images of a set are shuffled. The devices' images are cut from the first 60 %; the test images of all devices are
drawn from the rest, which no device trains on, so that accuracies are precise. Two devices may share test images.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.trainers.networks import Cnn, Network, OneHidden
from shoal_lab.experiments.common.experiment import one_of
from shoal_lab.experiments.data import datasets
from shoal_lab.experiments.wild.fleets import Fleet
from shoal_lab.experiments.wild.scenarios import NO_GROUP, Scenario

SIDE: Final = 14
TEST_IMAGES: Final = 200
"""Test images of a device."""
DEVICES_SHARE: Final = 0.6
TRAIN, VALIDATION = 0.6, 0.2
FEWEST_SAMPLES: Final = 5
"""Fewest images of a device, so that each share has one."""
NETWORKS: Final[dict[str, Network]] = {
    "mlp": OneHidden(SIDE * SIDE, 64, datasets.CLASSES),
    "cnn": Cnn(side=SIDE, classes=datasets.CLASSES, filters=(8,), dense=(32,), kernel=5, same=True),
}

Rng = np.random.Generator


@functools.lru_cache(maxsize=2)
def small_images(name: str, data_dir: Path | None) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return all images of a data set as (n, 14, 14) float32 in [0, 1], by means of 2 x 2 pixels, and their labels (n,)."""
    data = datasets.load(name, data_dir)
    x = np.concatenate([data.x_train, data.x_test])
    return x.reshape(-1, SIDE, 2, SIDE, 2).mean((2, 4)), np.concatenate([data.y_train, data.y_test])


def shifted(
    scenario: Scenario, group: int, x: NDArray[np.float32], y: NDArray[np.int64], rng: Rng, seed: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return a device's images (n, 14, 14) and labels as its group has them.

    Args:
        scenario: names the shift.
        group: the device's group; group 0 is left as it is.
        x: float32 in [0, 1].
        y: int64 below 10.
        rng: draws noise.
        seed: of permutations and textures, which all devices of a group share.

    Raises:
        UsageError: there is no such shift.
    """
    x, y = _SHIFTS[one_of("shift", scenario.shift, _SHIFTS)](scenario, group, x, y, rng, seed)
    return np.ascontiguousarray(x, np.float32), y.astype(np.int64)


def _swapped(scenario: Scenario, group: int, x: Any, y: Any, _rng: Rng, _seed: int) -> tuple[Any, Any]:
    first, second = scenario.pairs[group]
    return x, np.where(y == first, second, np.where(y == second, first, y))


def _turned(scenario: Scenario, group: int, x: Any, y: Any, _rng: Rng, _seed: int) -> tuple[Any, Any]:
    from scipy import ndimage

    if group:
        x = np.clip(ndimage.rotate(x, scenario.degrees * group, axes=(2, 1), reshape=False, order=1), 0, 1)
    return x, y


def _features(_scenario: Scenario, group: int, x: Any, y: Any, rng: Rng, _seed: int) -> tuple[Any, Any]:
    """Blur group 1, add noise to group 2, and invert group 3."""
    from scipy import ndimage

    if group == 1:
        x = ndimage.gaussian_filter(x, (0, 1.2, 1.2)) * 1.5
    if group == 2:
        x = np.clip(x + rng.normal(0, 0.4, x.shape), 0, 1)
    if group == 3:
        x = 1 - x
    return x, y


def _background(_scenario: Scenario, group: int, x: Any, y: Any, _rng: Rng, seed: int) -> tuple[Any, Any]:
    """Put a random texture, the same for all devices of a group, where an image is dark."""
    texture = np.random.default_rng([seed, group, 5]).random((SIDE, SIDE)).astype(np.float32) * 0.8
    return np.maximum(x, texture[None] * (x < 0.1)), y


_SHIFTS: Final[dict[str, Callable[[Scenario, int, Any, Any, Rng, int], tuple[Any, Any]]]] = {
    "none": lambda _scenario, _group, x, y, _rng, _seed: (x, y),
    "permuted": lambda _scenario, group, x, y, _rng, seed: (
        x,
        np.random.default_rng([seed, group, 77]).permutation(datasets.CLASSES)[y] if group else y,
    ),
    "swapped": _swapped,
    "rotated": lambda _scenario, group, x, y, _rng, _seed: (np.rot90(x, group, axes=(1, 2)), y),
    "turned": _turned,
    "features": _features,
    "background": _background,
    "dimmed": lambda _scenario, group, x, y, _rng, _seed: (x * 0.25 if group else x, y),
}


class _Pools:
    """The row numbers of all images by label: those that devices may hold, and those of the tests."""

    def __init__(self, labels: NDArray[np.int64], rng: Rng) -> None:
        order = rng.permutation(len(labels))
        half = int(len(labels) * DEVICES_SHARE)
        self._own, self._tests = (
            [part[labels[part] == c] for c in range(datasets.CLASSES)] for part in (order[:half], order[half:])
        )
        self._taken = [0] * datasets.CLASSES

    def own(self, counts: NDArray[np.int64], rng: Rng) -> NDArray[np.int64]:
        """Return rows that no device holds yet, ``counts[c]`` of label c; a label's images start over when all are dealt."""
        rows: list[int] = []
        for c, count in enumerate(counts):
            mine = self._own[c]
            rows += [int(mine[(self._taken[c] + i) % len(mine)]) for i in range(count)]
            self._taken[c] += int(count)
        return _shuffled(rows, rng)

    def tests(self, counts: NDArray[np.int64], rng: Rng) -> NDArray[np.int64]:
        """Return rows of test images, drawn with replacement, ``counts[c]`` of label c."""
        rows: list[int] = []
        for c, count in enumerate(counts):
            if count:
                rows += rng.choice(self._tests[c], count).tolist()
        return _shuffled(rows, rng)


def _shuffled(rows: list[int], rng: Rng) -> NDArray[np.int64]:
    array = np.array(rows, np.int64)
    rng.shuffle(array)
    return array


def deal(scenario: Scenario, *, seed: int, data_dir: Path | None, samples: int | None, test_images: int) -> Fleet:
    """Return the fleet of a scenario of images.

    Args:
        scenario: which images, groups and shift.
        seed: of the images, the groups' devices, label mixes and faults.
        data_dir: folder that is searched first for the data set.
        samples: images of each device instead of the scenario's numbers.
        test_images: test images of each device.

    Raises:
        MissingDataError: the data set is not here.
        UsageError: devices get too few images.
    """
    count = len(scenario.groups)
    sizes = [scenario.samples] * count if isinstance(scenario.samples, int) else list(scenario.samples)
    sizes = sizes if samples is None else [samples] * count
    if min(sizes) < FEWEST_SAMPLES:
        raise UsageError(f"{min(sizes)} images for a device", hint=f"a device needs at least {FEWEST_SAMPLES}")
    images, labels = small_images(scenario.data, data_dir)
    rng = np.random.default_rng([seed, 123])
    groups = np.array(scenario.groups)
    if scenario.later is None:
        groups = rng.permutation(groups)
    pools = _Pools(labels, rng)
    rows: list[tuple[NDArray[np.int64], ...]] = []
    for size in sizes:
        mix = _label_mix(scenario, rng)
        own = pools.own(rng.multinomial(size, mix), rng)
        tests = pools.tests(rng.multinomial(test_images, mix), rng)
        a, b = int(TRAIN * size), int((TRAIN + VALIDATION) * size)
        rows.append((own[:a], own[a:b], tests))

    def population(of: NDArray[np.int64], names: tuple[str, ...]) -> Population:
        shards: list[list[Shard]] = [[], [], []]
        for device, (group, shares) in enumerate(zip(of, rows, strict=True)):
            for into, name, share in zip(shards, names, shares, strict=True):
                noise = np.random.default_rng([seed, device, len(name), 9])
                x, y = shifted(scenario, int(group), images[share], labels[share], noise, seed)
                into.append(Shard(x.reshape(len(x), -1), y))
        train, validation, test = map(tuple, shards)
        return Population(train, validation, test, tuple(int(g) for g in of))

    first = _with_faults(scenario, population(groups, ("tr", "va", "te")), seed)
    later = None if scenario.later is None else population(np.array(scenario.later), ("tr2", "va2", "te2"))
    return Fleet(population=first, later=later, network=NETWORKS[scenario.network], local=LocalTraining())


def _label_mix(scenario: Scenario, rng: Rng) -> NDArray[np.float64]:
    """Return the share of each label on one device, shape (10,)."""
    if scenario.dirichlet:
        return rng.dirichlet([scenario.dirichlet] * datasets.CLASSES)
    mix = np.full(datasets.CLASSES, 1 / datasets.CLASSES)
    if scenario.labels:
        mix = np.zeros(datasets.CLASSES)
        mix[rng.choice(datasets.CLASSES, scenario.labels, replace=False)] = 1 / scenario.labels
    return mix


def _with_faults(scenario: Scenario, sound: Population, seed: int) -> Population:
    """Return the population with the labels or images of some devices replaced at random; their group is `NO_GROUP`."""
    if not scenario.faulty:
        return sound
    assert sound.groups is not None
    rng = np.random.default_rng([seed, 31])
    shares = [list(sound.train), list(sound.validation), list(sound.test)]
    groups = list(sound.groups)
    for device in rng.choice(len(sound), scenario.faulty, replace=False).tolist():
        groups[device] = NO_GROUP
        for share in shares:
            x, y = share[device].x, share[device].y
            if scenario.noise:
                share[device] = Shard(rng.random(x.shape).astype(np.float32), y)
            else:
                share[device] = Shard(x, rng.integers(0, datasets.CLASSES, len(y)))
    train, validation, test = map(tuple, shares)
    return Population(train, validation, test, tuple(groups))
