"""Independent component analysis of masked updates, for masks that mix coordinates.

It uses the Gram matrix of the updates alone, so that it works equally under every orthogonal mask. Hyvarinen and Oja,
"Independent Component Analysis: Algorithms and Applications" (2000): symmetric decorrelation, tanh.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal_lab.bench.attacks.structure.network import Rows

ITERATIONS: Final = 30
TINY: Final = 1e-6
"""Components with a smaller share of the largest one's variance are rounding."""


class Components(NamedTuple):
    """Components of updates.

    Attributes:
        activity: activity of each component in each update, (n, k), uncorrelated, variance 1.
        directions: direction of each component in the space of the updates, (k, d), float32.
    """

    activity: NDArray[np.float64]
    directions: Rows


def whiten(updates: Rows, most: int) -> tuple[NDArray[np.float64], Rows]:
    """Return the principal components' activities (n, k) with variance 1, and the centred updates (n, d) of norm 1 before."""
    norms = np.linalg.norm(updates, axis=1, keepdims=True)
    rows = updates / np.maximum(norms, np.float32(1e-30))
    rows -= rows.mean(0)
    n, d = rows.shape
    if n <= d:
        variance, axes = np.linalg.eigh((rows @ rows.T).astype(np.float64))
        scores = axes[:, ::-1] * np.sqrt(n)
    else:
        variance, axes = np.linalg.eigh((rows.T @ rows).astype(np.float64))
        kept = np.maximum(variance[::-1], TINY * variance[-1])
        scores = rows @ axes[:, ::-1] * np.sqrt(n / kept)
    count = min(most, int((variance > TINY * variance[-1]).sum()))
    return np.ascontiguousarray(scores[:, :count], np.float64), rows


def independent(white: NDArray[np.float64], iterations: int = ITERATIONS) -> NDArray[np.float64]:
    """Return independent activities (n, k), a rotation of the ``white`` ones (n, k)."""
    n, k = white.shape
    z = white.astype(np.float32)
    w = np.eye(k)
    for _ in range(iterations):
        bent = np.tanh(z @ w.astype(np.float32))
        w = (z.T @ bent).astype(np.float64) / n - w * (1 - bent * bent).mean(0, dtype=np.float64)
        size, axes = np.linalg.eigh(w.T @ w)
        w = w @ (axes / np.sqrt(np.maximum(size, 1e-12))) @ axes.T
    return np.asarray(white @ w, np.float64)


def analyse(updates: Rows, most: int = 0, iterations: int = ITERATIONS) -> Components:
    """Return the independent components of updates (n, d): at most ``most``, and half as many as updates or fewer."""
    bound = max(2, len(updates) // 2)
    white, rows = whiten(updates, min(most, bound) if most else bound)
    activity = independent(white, iterations)
    return Components(activity, activity.T.astype(np.float32) @ rows)


def mixed(updates: Rows, rng: np.random.Generator, most: int = 0) -> Components:
    """Return a random rotation of the principal components of `analyse`: the null, which has no analysis."""
    bound = max(2, len(updates) // 2)
    white, rows = whiten(updates, min(most, bound) if most else bound)
    turn = np.linalg.qr(rng.standard_normal((white.shape[1], white.shape[1])))[0]
    activity = white @ turn
    return Components(activity, activity.T.astype(np.float32) @ rows)
