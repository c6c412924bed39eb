"""Data of a fleet with attackers: ten devices that hold alike data, or whose label mixes differ.

The digits come with scikit-learn; MNIST and Fashion-MNIST are read from their files, at 14 x 14 pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from shoal.errors import UsageError
from shoal.experiments.data import datasets
from shoal.experiments.wild import images
from shoal.experiments.wild.fleets import Fleet
from shoal.experiments.wild.scenarios import Scenario, blocks
from shoal.simulation.data import Population, Shard
from shoal.simulation.trainers.networks import OneHidden
from shoal.task.manifest import LocalTraining

DEVICES: Final = 10
ATTACKERS: Final = 3
SAMPLES: Final = 150
"""Images of a device, of which 60 % are for training and 20 % for validation."""
TEST_IMAGES: Final = 200
"""Test images of a device, of MNIST and Fashion-MNIST; the digits have `DIGITS_TEST`."""
SKEW: Final = 0.3
"""Concentration of the Dirichlet distribution of each device's label mix, for data in ``-skewed``."""
DIGITS_TRAIN, DIGITS_VALIDATION, DIGITS_TEST = 90, 30, 50


@dataclass(frozen=True, slots=True)
class Data:
    """The data of a fleet: a data set, and whether label mixes differ."""

    source: str
    skewed: bool = False


DATA: Final[Mapping[str, Data]] = MappingProxyType(
    {
        "digits": Data("digits"),
        "mnist": Data("mnist"),
        "fashion-mnist": Data("fashion-mnist"),
        "mnist-skewed": Data("mnist", skewed=True),
    }
)


def attackers(population: Population) -> tuple[str, ...]:
    """Return the names of the devices that attack: the first ones, since data are dealt at random."""
    return population.names[:ATTACKERS]


def present(data_dir: Path | None) -> tuple[str, ...]:
    """Return the names of the data that are here; the digits always are."""
    return tuple(
        name
        for name, data in DATA.items()
        if data.source == "digits" or datasets.folder_of(data.source, data_dir) is not None
    )


def deal(name: str, seed: int, data_dir: Path | None) -> Fleet:
    """Return a fleet of `DEVICES` devices.

    Args:
        name: a key of `DATA`.
        seed: of the devices' samples and label mixes.
        data_dir: folder that is searched first for the files.

    Raises:
        UsageError: there are no such data.
        MissingDataError: the files are not here.
    """
    if name not in DATA:
        raise UsageError(f"no data {name!r}", hint=f"there are {', '.join(DATA)}")
    data = DATA[name]
    if data.source == "digits":
        return _digits(seed)
    scenario = Scenario(
        kind="none",
        title=name,
        data=data.source,
        groups=blocks(DEVICES),
        samples=SAMPLES,
        dirichlet=SKEW if data.skewed else 0.0,
    )
    return images.deal(scenario, seed=seed, data_dir=data_dir, samples=None, test_images=TEST_IMAGES)


def without(population: Population, names: tuple[str, ...]) -> Population:
    """Return the population without some devices."""
    kept = [i for i, name in enumerate(population.names) if name not in names]
    train, validation, test = (
        tuple(shards[i] for i in kept) for shards in (population.train, population.validation, population.test)
    )
    return Population(train, validation, test, names=tuple(population.names[i] for i in kept))


def with_flipped_labels(population: Population, names: tuple[str, ...]) -> Population:
    """Return the population in which some devices hold label 9 - y instead of y, in every share."""

    def shares(shards: tuple[Shard, ...]) -> tuple[Shard, ...]:
        last = datasets.CLASSES - 1
        return tuple(
            Shard(s.x, last - s.y) if name in names else s for name, s in zip(population.names, shards, strict=True)
        )

    return Population(
        shares(population.train), shares(population.validation), shares(population.test), names=population.names
    )


def _digits(seed: int) -> Fleet:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = (bunch.data / 16).astype(np.float32), bunch.target.astype(np.int64)
    order = np.random.default_rng([seed, 41]).permutation(len(x))
    sizes = (DIGITS_TRAIN, DIGITS_VALIDATION, DIGITS_TEST)
    ends = np.cumsum(sizes * DEVICES)
    parts = [Shard(x[rows], y[rows]) for rows in np.split(order[: ends[-1]], ends[:-1])]
    train, validation, test = (tuple(parts[share::3]) for share in range(3))
    return Fleet(
        population=Population(train, validation, test),
        network=OneHidden(x.shape[1], 64, datasets.CLASSES),
        local=LocalTraining(),
    )
