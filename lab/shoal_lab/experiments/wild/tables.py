"""Deal tables to the devices of a scenario: those that scikit-learn brings along, and three that are drawn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.trainers.networks import Linear, Network, Softmax
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
