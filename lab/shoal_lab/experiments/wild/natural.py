"""Deal two real fleets: turbofan engines run to failure (C-MAPSS), and the air at twelve stations in Beijing.

Training, validation and test samples are from other engines, or from other stretches of time. Features are in the scale of the
fleet's statistics, as `--standardise federated` makes them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.trainers.networks import Linear, OneHidden
from shoal_lab.experiments.data import datasets
from shoal_lab.experiments.wild.fleets import Fleet, in_units
from shoal_lab.experiments.wild.scenarios import Scenario

SAMPLES: Final = (180, 60, 200)
"""Training, validation and test samples of a device."""
ENGINES: Final = (3, 1, 2)
"""Engines of a device whose cycles are for training, validation and the test."""
HOURS: Final = (0.6, 0.2, 0.2)
"""Shares of a station's hours, in order of time, for the same."""
LIFE_CLASSES: Final = (25, 75, 125)
"""Cycles left at which the next class begins."""
AHEAD_H: Final = 6
CLASSES: Final = 4
UNITS: Final = 32
RURAL: Final = ("Changping", "Dingling", "Huairou", "Shunyi")
"""Stations outside the city, the second group."""

Pools = list[tuple[int, list[tuple[NDArray[Any], NDArray[Any]]]]]
"""The group of each device, and the features and figures from which its three shares are drawn."""


def deal(scenario: Scenario, *, seed: int, data_dir: Path | None) -> Fleet:
    """Return the fleet of ``cmapss`` or ``air``.

    Raises:
        MissingDataError: the file is not here.
        DataError: it can't be read.
    """
    rng = np.random.default_rng([seed, 8])
    path = datasets.locate(scenario.data, data_dir)[f"{scenario.data}.npz"][0]
    try:
        with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
            pools = _engines(arrays, rng) if scenario.data == "cmapss" else _stations(arrays)
        rows = [[_drawn(x, y, n, rng) for (x, y), n in zip(pool, SAMPLES, strict=True)] for _, pool in pools]
    except (OSError, ValueError, KeyError, IndexError, zipfile.BadZipFile) as error:
        raise DataError(f"{path} can't be read: {error}", hint=datasets.obtain(scenario.data, data_dir)) from None
    seen = np.concatenate([shares[0][1] for shares in rows])
    edges = LIFE_CLASSES if scenario.data == "cmapss" else np.quantile(seen, [0.25, 0.5, 0.75])

    def shard(x: NDArray[Any], y: NDArray[Any]) -> Shard:
        target = ((y - seen.mean()) / seen.std()).astype(np.float32) if scenario.regression else np.digitize(y, edges)
        return Shard(x.astype(np.float32), target)

    train, validation, test = (tuple(shard(*shares[i]) for shares in rows) for i in range(len(SAMPLES)))
    population = Population(train, validation, test, tuple(group for group, _ in pools))
    inputs = train[0].x.shape[1]
    network = Linear(inputs, bias=True) if scenario.regression else OneHidden(inputs, UNITS, CLASSES)
    return in_units(population, network, LocalTraining(lr=0.01 if scenario.regression else 0.1))


def _engines(arrays: Mapping[str, NDArray[Any]], rng: np.random.Generator) -> Pools:
    """Return devices of engines of one kind each; those that are left over belong to none."""
    x, left, unit, kind = (arrays[name] for name in ("x", "rul", "unit", "subset"))
    ends, pools = np.cumsum(ENGINES), []
    for group, subset in enumerate(np.unique(kind)):
        engines = rng.permutation(np.unique(unit[kind == subset]))
        for mine in engines[: len(engines) // ends[-1] * ends[-1]].reshape(-1, ends[-1]):
            places = [np.flatnonzero((kind == subset) & np.isin(unit, part)) for part in np.split(mine, ends[:-1])]
            pools.append((group, [(x[rows], left[rows]) for rows in places]))
    return pools


def _stations(arrays: Mapping[str, NDArray[Any]]) -> Pools:
    """Return a device for each station, with the logarithm of PM2.5 some hours later; hours without figures are left out."""
    pools = []
    for name, x in zip(arrays["stations"].tolist(), arrays["x"], strict=True):
        y = np.log1p(x[AHEAD_H:, 0])
        ends = (np.cumsum(HOURS)[:-1] * len(y)).astype(int)
        parts = zip(np.split(x[:-AHEAD_H], ends), np.split(y, ends), strict=True)
        full = [(a, b, np.isfinite(a).all(1) & np.isfinite(b)) for a, b in parts]
        pools.append((int(name in RURAL), [(a[rows], b[rows]) for a, b, rows in full]))
    return pools


def _drawn(x: NDArray[Any], y: NDArray[Any], count: int, rng: np.random.Generator) -> tuple[NDArray[Any], NDArray[Any]]:
    rows = np.sort(rng.choice(len(x), count, replace=False))
    return x[rows], y[rows]
