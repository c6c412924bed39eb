"""The rows of the report: statistics of made-up devices, under the mask alone and behind the dense matrix."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from crypto.mask.dense import behind_matrix
from crypto.mask.masking import mask
from edge_client.learning.statistics import statistics_of
from shoal.task.data_declaration import DataDeclaration
from shoal_lab.bench.attacks.base import Attack, Result
from shoal_lab.bench.attacks.features.reading import Rows, axes, blocks, plausible, relations
from shoal_lab.bench.attacks.lab import Lab

WHO: Final = "aggregator alone, with the vectors of one round of statistics"
WAYS: Final[Mapping[str, int]] = MappingProxyType({"under the mask alone": 0, "as fleets send them": 32})
"""Rows of the dense matrix before the mask, which is the statistics' number up to a multiple of 32."""
LARGE: Final = 159_010
SMALL: Final = 4096
SAMPLES: Final = 60
READ: Final = 0.25
"""A figure is read if the root mean square error is at most this share of its spread between the devices."""
PLACES: Final = 28
"""Masked coordinates that relations are looked for between."""
KNOWN: Final = 8
"""Devices whose vectors give the relations; the others' judge them."""


def vectors(lab: Lab, features: int, devices: int, length: int) -> NDArray[np.float32]:
    """Return statistics (devices, length), float32, by the function that devices use."""
    rng = lab.rng(f"statistics {features} {devices}")
    names = tuple(f"f{i}" for i in range(features))
    data = DataDeclaration(features=names, low=(-1.0,) * features, high=(1.0,) * features)
    level = rng.uniform(-0.5, 0.5, features) + rng.normal(0, 0.15, (devices, features))
    spread = rng.uniform(0.05, 0.3, features) * rng.uniform(0.7, 1.4, (devices, features))
    samples = level[:, None] + spread[:, None] * rng.standard_normal((devices, SAMPLES, features))
    return np.stack([statistics_of(x.astype(np.float32), data, length) for x in samples])


def received(lab: Lab, mode: str, sent: NDArray[np.float32], matrix: int) -> Rows:
    """Return the vectors (n, d) that the aggregator gets, with ``matrix`` rows of the dense matrix before the mask."""
    key = lab.derive(mode, sent.shape[1])
    if matrix:
        key = behind_matrix(key, lab.round_keys(1, "fleet").mask, matrix)
    return np.stack([mask(row, key).values for row in sent]).astype(np.float64)


def errors(found: Rows, truth: NDArray[np.float32]) -> Rows:
    """Return the error of each figure but the 1, in its spread, for the column and the sign that are nearest: (2 p,)."""
    best = [
        min(float(np.sqrt(np.mean((sign * column - one) ** 2))) for column in found.T for sign in (1, -1))
        for one in truth.T[:-1].astype(np.float64)
    ]
    spread: Rows = truth.std(0, dtype=np.float64)[:-1]
    return np.array(best) / spread


def reading(lab: Lab, name: str, found: Rows, sent: NDArray[np.float32], rank: int) -> Result:
    """Return the result of figures (n, c) that were read; chance is any orthogonal matrix on what the Gram matrix tells."""
    turn = np.linalg.qr(lab.rng("turn").standard_normal((rank, rank)))[0]
    truth = sent[:, :rank]
    got, by_chance = errors(found, truth), errors(axes(truth.astype(np.float64), rank)[0] @ turn, truth)
    return Result(
        name=name,
        attacker=WHO,
        success=float((got <= READ).mean()),
        chance=float((by_chance <= READ).mean()),
        unit="share",
        devices=len(sent),
        note=f"median error {np.median(got):.2g} of a figure's spread between devices, by chance {np.median(by_chance):.2g}",
    )


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the results under a mask; without one the aggregator is sent the figures themselves."""
    if lab.keeps(mode) == "order":
        return []
    results, wide, small = [], vectors(lab, 8, 20, LARGE), vectors(lab, 4, 12, SMALL)
    for way, matrix in WAYS.items():
        found = blocks(received(lab, mode, wide, matrix), 17)
        results.append(reading(lab, f"statistics-blocks, p 8, {way}", found, wide, 17))
        places = lab.rng("places").choice(SMALL, PLACES, replace=False)
        if lab.keeps(mode) == "lengths":
            results.append(
                Result(
                    name=f"statistics-lattice, p 4, {way}",
                    attacker=WHO,
                    success=relations(received(lab, mode, small, matrix)[:, places], KNOWN, 9),
                    chance=relations(lab.rng("noise").standard_normal((len(small), PLACES)), KNOWN, 9),
                    unit="share",
                    devices=len(small),
                    note="integer relations from eight devices' vectors that hold for the four others",
                )
            )
    return results + [gram(lab, features) for features in (1, 2, 4, 8)]


def gram(lab: Lab, features: int) -> Result:
    """Return what the Gram matrix of the vectors tells, which is the same under every mask."""
    sent, steps = vectors(lab, features, 20, 2 * features + 1), lab.trials(600, 200)
    found = lab.once(("plausible", features), lambda: plausible(sent.astype(np.float64), features, steps))
    return reading(lab, f"statistics-gram, p {features}", found, sent, 2 * features + 1)


ATTACK: Final = Attack(
    "feature statistics",
    "Cardoso and Souloumiac 1996; Nguyen and Stern 1997; Lenstra, Lenstra and Lovasz 1982",
    WHO,
    run,
)
