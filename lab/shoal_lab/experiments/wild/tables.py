"""Deal tables to the devices of a scenario: those that scikit-learn brings along, three that are drawn, and two real fleets.

The real fleets are turbofan engines run to failure (C-MAPSS), and the air at twelve stations in Beijing. Their training,
validation and test samples are from other engines, or from other stretches of time. Features are in the scale of the fleet's
statistics, as `--standardise federated` makes them.
"""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.errors import DataError
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.trainers.networks import Linear, Network, OneHidden, Softmax
from shoal_lab.experiments.data import datasets
from shoal_lab.experiments.wild.fleets import Fleet, in_units
from shoal_lab.experiments.wild.scenarios import Scenario

DRAWN_ROWS: Final = 260
"""Rows of a device that are drawn, of which `DRAWN_OWN` are its own and the rest are its test share."""
DRAWN_OWN: Final = 60
DRAWN_INPUTS: Final = 20
DRAWN_DEVICES: Final = 18
DRAWN_GROUPS: Final = 3
DRAWN_MEMORY: Final = 0.9
"""Correlation of an input of a series with the one before."""
DRAWN_TURN: Final = 0.5
"""Share of another plane that a series has gained at its end."""
TRAIN, VALIDATION = 0.6, 0.2

Rows = tuple[list[NDArray[Any]], list[NDArray[Any]]]
"""x and y of each device."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Table:
    """A table of scikit-learn: its loader, the number of devices and groups, and the labels of group g."""

    load: str
    devices: int
    groups: int
    network: Network
    lr: float
    relabel: Callable[[NDArray[Any], int], NDArray[Any]]


_TABLES: Final = {
    "diabetes": _Table(
        load="load_diabetes",
        devices=10,
        groups=2,
        network=Linear(10, bias=True),
        lr=0.01,
        relabel=lambda y, g: -y if g else y,
    ),
    "breast-cancer": _Table(
        load="load_breast_cancer",
        devices=10,
        groups=2,
        network=Softmax(30, 2),
        lr=0.1,
        relabel=lambda y, g: 1 - y if g else y,
    ),
    "wine": _Table(
        load="load_wine", devices=6, groups=2, network=Softmax(13, 3), lr=0.1, relabel=lambda y, g: (y + g) % 3
    ),
    "digits": _Table(
        load="load_digits", devices=10, groups=2, network=Softmax(64, 10), lr=0.1, relabel=lambda y, g: (y + g) % 10
    ),
    "iris": _Table(load="load_iris", devices=6, groups=1, network=Softmax(4, 3), lr=0.1, relabel=lambda y, _: y),
}


def deal(scenario: Scenario, *, seed: int) -> Fleet:
    """Return the fleet of a scenario of tables. Groups take turns, device i of group i modulo their number, unless given."""
    rng = np.random.default_rng([seed, 4])
    table = _TABLES.get(scenario.data)
    devices, count = (table.devices, table.groups) if table is not None else (DRAWN_DEVICES, DRAWN_GROUPS)
    groups = np.array(scenario.groups) if scenario.groups else np.arange(devices) % count
    labelled = np.zeros_like(groups) if scenario.shift == "scaled" else groups
    if table is not None:
        rows, network, lr = _shipped(table, rng, labelled), table.network, table.lr
    else:
        rows, network, lr = _DRAWN[scenario.data](rng, labelled)
    if scenario.shift == "scaled":
        scales = (10.0 ** rng.uniform(-1, 1, (groups.max() + 1, DRAWN_INPUTS))).astype(np.float32)
        rows = [x * scales[group] for x, group in zip(rows[0], groups, strict=True)], rows[1]
    shares: list[list[Shard]] = [[], [], []]
    for x, y in zip(*rows, strict=True):
        own = len(x) if table is not None else DRAWN_OWN
        cuts = [0, int(TRAIN * own), int((TRAIN + VALIDATION) * own), len(x)]
        for into, start, end in zip(shares, cuts, cuts[1:], strict=False):
            into.append(Shard(x[start:end], y[start:end]))
    train, validation, test = map(tuple, shares)
    population = Population(train, validation, test, tuple(groups.tolist()))
    if scenario.shift == "scaled":
        return in_units(population, network, LocalTraining(lr=lr))
    return Fleet(population=population, network=network, local=LocalTraining(lr=lr))


def _shipped(table: _Table, rng: np.random.Generator, groups: NDArray[np.int64]) -> Rows:
    from sklearn import datasets

    x, y = getattr(datasets, table.load)(return_X_y=True)
    if table.network.kind == "regression":
        x, y = x / x.std(0), ((y - y.mean()) / y.std()).astype(np.float32)
    else:
        # A pixel that is the same in all images has no deviation to divide by.
        x, y = (x - x.mean(0)) / np.maximum(x.std(0), 1e-9), y.astype(np.int64)
    x = x.astype(np.float32)
    parts = np.array_split(rng.permutation(len(x)), len(groups))
    return [x[p] for p in parts], [table.relabel(y[p], g) for p, g in zip(parts, groups.tolist(), strict=True)]


def _linear(rng: np.random.Generator, groups: NDArray[np.int64]) -> tuple[Rows, Network, float]:
    """Return y = w_g x + noise, with a w for each group."""
    w = rng.normal(size=(DRAWN_GROUPS, DRAWN_INPUTS)) / np.sqrt(DRAWN_INPUTS) * 2
    x = _drawn_inputs(rng)
    y = [(a @ w[g] + rng.normal(0, 0.3, DRAWN_ROWS)).astype(np.float32) for a, g in zip(x, groups, strict=True)]
    return (x, y), Linear(DRAWN_INPUTS, bias=True), 0.01


def _planes(rng: np.random.Generator, groups: NDArray[np.int64]) -> tuple[Rows, Network, float]:
    """Return labels by the side of a noisy plane, with a plane for each group."""
    w = rng.normal(size=(DRAWN_GROUPS, DRAWN_INPUTS))
    x = _drawn_inputs(rng)
    y = [((a @ w[g] + rng.normal(0, 0.5, DRAWN_ROWS)) > 0).astype(np.int64) for a, g in zip(x, groups, strict=True)]
    return (x, y), Softmax(DRAWN_INPUTS, 2), 0.1


def _series(rng: np.random.Generator, groups: NDArray[np.int64]) -> tuple[Rows, Network, float]:
    """Return labels as `_planes`, of inputs each of which depends on the one before, by planes that turn in time."""
    from scipy.signal import lfilter

    w, turn = rng.normal(size=(2, DRAWN_GROUPS, DRAWN_INPUTS))
    time = np.linspace(0, DRAWN_TURN, DRAWN_ROWS)[:, None]
    steps = [np.sqrt(1 - DRAWN_MEMORY**2) * a for a in _drawn_inputs(rng)]
    x = [lfilter([1], [1, -DRAWN_MEMORY], a, axis=0).astype(np.float32) for a in steps]
    y = [
        ((a * (w[g] + time * turn[g])).sum(1) + rng.normal(0, 0.5, DRAWN_ROWS) > 0).astype(np.int64)
        for a, g in zip(x, groups, strict=True)
    ]
    return (x, y), Softmax(DRAWN_INPUTS, 2), 0.1


def _drawn_inputs(rng: np.random.Generator) -> list[NDArray[np.float32]]:
    return [rng.normal(size=(DRAWN_ROWS, DRAWN_INPUTS)).astype(np.float32) for _ in range(DRAWN_DEVICES)]


_DRAWN: Final = {"linear": _linear, "planes": _planes, "series": _series}


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


def deal_real(scenario: Scenario, *, seed: int, data_dir: Path | None) -> Fleet:
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
