"""A device's statistics of its features, read by the aggregator from the vectors of one round.

The vectors differ in 2 p + 1 coordinates alone, which all devices have at the same places. Under the mask alone that opens them:

- *blocks*: a rotation spreads each coordinate unevenly over the output's blocks, which are at public places. After whitening, the
  blocks' Gram matrices are diagonal in the same basis: Cardoso and Souloumiac, "Jacobi angles for simultaneous
  diagonalization" (1996).
- *lattice*: each masked coordinate is a sum of the figures with small integers, so that few masked coordinates have integer
  relations, which hold for every device: Nguyen and Stern, "Merkle-Hellman revisited" (1997), and Lenstra, Lenstra and Lovasz,
  "Factoring polynomials with rational coefficients" (1982).

Behind the dense matrix (`crypto.mask.dense`), as fleets send them, the Gram matrix of the vectors is left. *gram* asks what it
tells alone: which of all statistics with that matrix have each mean square between the mean's square and 1?
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from crypto.mask.dense import behind_matrix
from crypto.mask.masking import mask
from edge_client.learning.statistics import statistics_of
from shoal.bench.attacks.base import Attack, Result
from shoal.bench.attacks.lab import Lab
from shoal.protocol.precision.hadamard import MAX_BLOCK_BITS
from shoal.task.data_declaration import DataDeclaration

Rows = NDArray[np.float64]
WHO: Final = "aggregator alone, with the vectors of one round"
WAYS: Final = {"mask alone": False, "behind the matrix": True}
SAMPLES: Final = 60
READ: Final = 0.25
"""A figure is read if the error is at most this share of its spread between the devices."""
PLACES: Final = 28
"""Masked coordinates of which the lattice's attack looks for relations."""
SIZE: Final = 64
HOLDS: Final = 1e-3
"""A relation holds for another device if it leaves at most this share of what random numbers would leave."""
GRAM_TRIALS: Final = (4000, 400)


def statistics(lab: Lab, features: int, devices: int, length: int) -> NDArray[np.float32]:
    """Return the statistics of made-up devices, (devices, length) float32, by the function that devices use."""
    rng = lab.rng(f"statistics {features} {devices}")
    ends = (1.0,) * features
    data = DataDeclaration(features=tuple(f"f{i}" for i in range(features)), low=tuple(-e for e in ends), high=ends)
    level, spread = rng.uniform(-0.5, 0.5, features), rng.uniform(0.05, 0.3, features)
    shift = rng.normal(0, 0.15, (devices, features))
    samples = level + shift[:, None] + spread * rng.standard_normal((devices, SAMPLES, features))
    return np.stack([statistics_of(x.astype(np.float32), data, length) for x in samples])


def seen(lab: Lab, mode: str, rows: NDArray[np.float32], matrix: bool) -> Rows:
    """Return the vectors that the aggregator gets, (devices, d)."""
    key = lab.derive(mode, rows.shape[1])
    if matrix:
        key = behind_matrix(key, lab.secret, SIZE)
    return np.stack([mask(row, key).values for row in rows]).astype(np.float64)
