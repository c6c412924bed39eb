"""Data of a fleet with attackers: ten or twenty devices that hold alike data, or whose label mixes differ.

The digits come with scikit-learn; MNIST and Fashion-MNIST are read from their files, at 14 x 14 pixels.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.trainers.networks import OneHidden
from shoal_lab.experiments.data import datasets
from shoal_lab.experiments.wild import images
from shoal_lab.experiments.wild.fleets import Fleet
from shoal_lab.experiments.wild.scenarios import Scenario, blocks

SAMPLES: Final = 150
"""Images of a device, of which 60 % are for training and 20 % for validation."""
TEST_IMAGES: Final = 200
"""Test images of a device, of MNIST and Fashion-MNIST; for the digits see `DIGITS_SHARES`."""
SKEW: Final = 0.3
"""Concentration of the Dirichlet distribution of each device's label mix, for data in ``-skewed``."""
DIGITS_SHARES: Final = (900, 300, 500)
"""Images of digits for training, validation and test, which the devices share out evenly."""
TRIGGER: Final = 2
"""Side in pixels of a backdoor's trigger: a white square in the lower right corner."""
TARGET: Final = 0
"""Label that a backdoor gives to images with the trigger."""
PAINTED: Final = 3
"""One of so many training images of an attacker bears the trigger. With half of them painted the filter finds the attackers on
digits; with an eighth they succeed more slowly."""


DATA: Final[Mapping[str, tuple[str, float]]] = MappingProxyType(
    {
        "digits": ("digits", 0.0),
        "mnist": ("mnist", 0.0),
        "fashion-mnist": ("fashion-mnist", 0.0),
        "mnist-skewed": ("mnist", SKEW),
    }
)
"""Data set by name, and the concentration of each device's label mix; 0 where all hold alike data."""


def present(data_dir: Path | None) -> tuple[str, ...]:
    """Return the names of the data that are here; the digits always are."""
    return tuple(
        name
        for name, (source, _) in DATA.items()
        if source == "digits" or datasets.folder_of(source, data_dir) is not None
    )


def deal(name: str, seed: int, data_dir: Path | None, devices: int) -> Fleet:
    """Return a fleet.

    Args:
        name: a key of `DATA`.
        seed: of the devices' samples and label mixes.
        data_dir: folder that is searched first for the files.
        devices: their number.

    Raises:
        MissingDataError: the files are not here.
    """
    source, skew = DATA[name]
    if source == "digits":
        return _digits(seed, devices)
    scenario = Scenario(
        kind="none",
        title=name,
        data=source,
        groups=blocks(devices),
        samples=SAMPLES,
        dirichlet=skew,
    )
    return images.deal(scenario, seed=seed, data_dir=data_dir, samples=None, test_images=TEST_IMAGES)


def flipped(shard: Shard) -> Shard:
    """Return the samples with label 9 - y instead of y."""
    return Shard(shard.x, datasets.CLASSES - 1 - shard.y)


def poisoned(shard: Shard) -> Shard:
    """Return the images (n, side * side), of which one in `PAINTED` has the trigger and the label `TARGET`."""
    return _painted(shard, PAINTED)


def triggered(shard: Shard) -> Shard:
    """Return the images of other classes than `TARGET` with the trigger, labelled `TARGET`: a backdoor's successes are right."""
    others = shard.y != TARGET
    return _painted(Shard(shard.x[others], shard.y[others]), 1)


def _painted(shard: Shard, every: int) -> Shard:
    x, y = shard.x.copy(), shard.y.copy()
    side = round(x.shape[1] ** 0.5)
    x.reshape(-1, side, side)[::every, -TRIGGER:, -TRIGGER:] = 1.0
    y[::every] = TARGET
    return Shard(x, y)


def _digits(seed: int, devices: int) -> Fleet:
    from sklearn.datasets import load_digits

    bunch = load_digits()
    x, y = (bunch.data / 16).astype(np.float32), bunch.target.astype(np.int64)
    order = np.random.default_rng([seed, 41]).permutation(len(x))
    ends = np.cumsum([share // devices for share in DIGITS_SHARES] * devices)
    parts = [Shard(x[rows], y[rows]) for rows in np.split(order[: ends[-1]], ends[:-1])]
    return Fleet(
        population=Population(tuple(parts[0::3]), tuple(parts[1::3]), tuple(parts[2::3])),
        network=OneHidden(x.shape[1], 64, datasets.CLASSES),
        local=LocalTraining(),
    )
