"""Deal samples to devices, cut a device's samples into training, validation and test shares, and summarise a population."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.simulation.data import Population, Shard


class Shares(NamedTuple):
    """Fractions of a device's samples for training, validation and test; they add up to 1."""

    train: float
    validation: float
    test: float


CFL_SHARES: Final = Shares(0.6, 0.2, 0.2)
NINETY_TEN: Final = Shares(0.9, 0.0, 0.1)
DIRICHLET_TRIES: Final = 1000
_ROUNDING: Final = 1e-9
"""Added before rounding down, so that 0.6 + 0.2 of 10 samples are 8."""


def dirichlet_rows(
    y: NDArray[np.int64], classes: Iterable[int], *, devices: int, alpha: float, rng: np.random.Generator, least: int
) -> list[NDArray[np.int64]]:
    """Return which samples of labels ``y`` (n,) each device holds, in random order: each class dealt by a Dirichlet draw.

    Raises:
        UsageError: no draw gave every device ``least`` samples.
    """
    for _ in range(DIRICHLET_TRIES):
        held: list[list[NDArray[np.int64]]] = [[] for _ in range(devices)]
        for c in classes:
            of_class = rng.permutation(np.flatnonzero(y == c))
            ends = (np.cumsum(rng.dirichlet(np.full(devices, alpha)))[:-1] * len(of_class)).astype(np.int64)
            for mine, part in zip(held, np.split(of_class, ends), strict=True):
                mine.append(part)
        if min(sum(map(len, rows)) for rows in held) >= least:
            return [rng.permutation(np.concatenate(rows)) for rows in held]
    raise UsageError(
        f"no draw in {DIRICHLET_TRIES} gave each of {devices} devices {least} samples",
        hint="raise alpha, or take fewer devices",
    )


def cut(
    x: NDArray[Any], y: NDArray[Any], rows: NDArray[np.int64], shares: Shares, names: NDArray[np.int64] | None = None
) -> tuple[Shard, Shard, Shard]:
    """Cut ``rows``, in their order, into training, validation and test shards; training gets at least one sample.

    Args:
        x: shape (n, ...).
        y: shape (n, ...).
        rows: shape (count,), int64, indices of the device's samples.
        shares: fractions for training, validation and test.
        names: shape (classes,), int64, the new name of each label; None leaves labels unchanged.

    Raises:
        UsageError: the shares don't add up.
    """
    if min(shares) < 0 or shares.train <= 0 or not math.isclose(sum(shares), 1.0):
        raise UsageError(f"shares {tuple(shares)} must add up to 1, with some to train on")
    count = len(rows)
    train = min(count, max(1, int(shares.train * count + _ROUNDING)))
    seen = int((shares.train + shares.validation) * count + _ROUNDING) if shares.test else count
    mine, labels = x[rows], y[rows]
    if names is not None:
        labels = names[labels]
    bounds = (0, train, max(train, seen), count)
    first, second, third = (Shard(mine[a:b], labels[a:b]) for a, b in itertools.pairwise(bounds))
    return first, second, third


def population_of(parts: Sequence[tuple[Shard, Shard, Shard]], groups: tuple[int, ...] | None) -> Population:
    """Return the population of devices with these (training, validation, test) shards and true groups."""
    train, validation, test = zip(*parts, strict=True) if parts else ((), (), ())
    return Population(train, validation, test, groups)


def by_shard(
    shards: Sequence[Shard], *, seed: int, shares: Shares = NINETY_TEN, groups: Sequence[int] | None = None
) -> Population:
    """Make a device of each shard, for example a writer's: shuffle it and cut it by ``shares``."""
    rng = np.random.default_rng(seed)
    parts = [cut(s.x, s.y, rng.permutation(len(s)), shares) for s in shards]
    return population_of(parts, None if groups is None else tuple(groups))


def statistics(population: Population) -> dict[str, Any]:
    """Return statistics to compare with a paper's: devices, samples in total and by share, samples per device."""
    train, validation, test, probes = (
        np.array([len(s) for s in shards], np.int64)
        for shards in (population.train, population.validation, population.test, population.probes)
    )
    held = train + validation + test
    return {
        "devices": len(population),
        "samples": int(held.sum() + probes.sum()),
        "train": int(train.sum()),
        "validation": int(validation.sum()),
        "test": int(test.sum()),
        "probes": len(probes),
        "probe_samples": int(probes.sum()),
        "groups": None if population.groups is None else len(set(population.groups)),
        "samples_a_device": {
            "min": int(held.min()),
            "median": float(np.median(held)),
            "mean": float(held.mean()),
            "max": int(held.max()),
        },
    }
