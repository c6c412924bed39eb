"""A device's statistics of its features, read by the aggregator alone from the vectors of one round.

Each attack runs on vectors under the mask alone, where it succeeds, and on vectors as fleets send them: behind the dense matrix.
The vectors differ in 2 p + 1 coordinates alone, which all devices have at the same places.

- `blocks`: a rotation spreads each coordinate unevenly over the output's blocks, which are at public places. After whitening,
  the blocks' Gram matrices are diagonal in one basis: Cardoso and Souloumiac, "Jacobi angles for simultaneous
  diagonalization" (1996).
- `relations`: each masked coordinate of a small model is a sum of the figures with small integers. So a few of them have integer
  relations, which hold for every device: Nguyen and Stern, "Merkle-Hellman revisited" (1997); Lenstra, Lenstra and Lovasz,
  "Factoring polynomials with rational coefficients" (1982).
- `plausible`: the Gram matrix of the vectors gives the figures but for an orthogonal matrix. One figure is 1, and a mean square
  follows from the mean but for a variance that differs little between devices: so the most plausible matrix is searched for.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray
from sympy import QQ, ZZ
from sympy.polys.matrices import DomainMatrix

from crypto.mask.dense import behind_matrix
from crypto.mask.hadamard import MAX_BLOCK_BITS
from crypto.mask.masking import mask
from edge_client.learning.statistics import statistics_of
from shoal.task.data_declaration import DataDeclaration
from shoal_lab.bench.attacks.lab import Attack, Lab, Result

Rows = NDArray[np.float64]
SWEEPS: Final = 6
BITS: Final = 20
"""Bits of a masked float32 that count: the last ones are rounding."""
HOLDS: Final = 1e-3
"""A relation holds for a device if it leaves at most this share of what it would leave of random numbers."""
STARTS: Final = 32
OUTSIDE: Final = 10.0
"""Weight of impossible figures in the search, against one spread of the variances."""


def axes(rows: Rows, rank: int) -> tuple[Rows, Rows]:
    """Return vectors (n, d) of a rank as coordinates (n, rank) along orthonormal axes (rank, d)."""
    values, vectors = np.linalg.eigh(rows @ rows.T)
    left, lengths = vectors[:, -rank:], np.sqrt(np.maximum(values[-rank:], 1e-12))
    return left * lengths, (left / lengths).T @ rows


def blocks(rows: Rows, rank: int) -> Rows:
    """Return the figures (n, rank), up to signs and order, from masked vectors (n, d)."""
    found, along = axes(rows, rank)
    count = max(rows.shape[1] >> MAX_BLOCK_BITS, 1)
    grams = np.stack([along[:, at::count] @ along[:, at::count].T for at in range(count)])
    for _ in range(SWEEPS):
        for a in range(rank):
            for b in range(a + 1, rank):
                pair = np.stack([grams[:, a, a] - grams[:, b, b], 2 * grams[:, a, b]])
                (own, cross), (_, other) = pair @ pair.T
                angle = np.arctan2(2 * cross, own - other + np.hypot(2 * cross, own - other)) / 2
                turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
                grams[:, :, [a, b]] = grams[:, :, [a, b]] @ turn
                grams[:, [a, b]] = turn.T @ grams[:, [a, b]]
                found[:, [a, b]] = found[:, [a, b]] @ turn
    return found


def relations(rows: Rows, known: int, rank: int) -> float:
    """Return the share of integer relations, found from ``known`` of the vectors (n, m), that hold for the others."""
    count = rows.shape[1]
    scaled = np.rint(rows[:known].T * (2.0**BITS / np.abs(rows[:known]).max())).astype(np.int64)
    columns = np.concatenate([np.eye(count, dtype=np.int64), scaled], 1)
    basis = np.array(DomainMatrix(columns.tolist(), columns.shape, ZZ).lll(QQ(99, 100)).to_list(), np.int64)
    short = basis[np.argsort((basis.astype(np.float64) ** 2).sum(1))][: count - rank, :count]
    left = np.abs(short @ rows[known:].T)
    return float((left < HOLDS * np.linalg.norm(short, axis=1)[:, None] * rows[known:].std(1)).all(1).mean())


def plausible(rows: Rows, features: int, steps: int) -> Rows:
    """Return the most plausible figures (n, 2 p), up to signs and order, from vectors (n, d) by their Gram matrix alone."""
    import torch

    coordinates = axes(rows, 2 * features + 1)[0]
    ones = np.linalg.lstsq(coordinates, np.ones(len(rows)), rcond=None)[0]
    others = torch.from_numpy(coordinates @ np.linalg.svd(ones[None])[2][1:].T)
    draws = torch.from_numpy(np.random.default_rng(0).standard_normal((STARTS, 2 * features, 2 * features)))
    turned, upper = torch.linalg.qr(draws)
    # The signs of the other factor's diagonal: without them the starts are not uniformly distributed.
    first = turned * upper.diagonal(dim1=1, dim2=2).sign()[:, None]
    turns = torch.zeros_like(draws, requires_grad=True)
    search = torch.optim.Adam([turns], lr=0.03)
    for _ in range(steps):
        figures = others @ (first @ torch.matrix_exp(turns - turns.mT))
        means, squares = figures[..., :features], figures[..., features:]
        variances = squares - means**2
        impossible = torch.relu(-variances) ** 2 + torch.relu(means.abs() - 1) ** 2
        doubt = OUTSIDE * impossible.sum((1, 2)) + (variances.var(1) / (squares.var(1) + 1e-6)).sum(1)
        search.zero_grad()
        doubt.sum().backward()
        search.step()
    return np.asarray(figures[int(doubt.argmin())].detach(), np.float64)


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


def feature_statistics(lab: Lab, mode: str) -> list[Result]:
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


ATTACKS: Final = (
    Attack(
        "feature statistics",
        "Cardoso and Souloumiac 1996; Nguyen and Stern 1997; Lenstra, Lenstra and Lovasz 1982",
        WHO,
        feature_statistics,
    ),
)
