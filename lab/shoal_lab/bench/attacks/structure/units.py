"""Groups of coordinates or components that belong to one hidden unit, from masked updates; and the score of such groups.

For masks that mix coordinates it has independent component analysis, which uses the Gram matrix of the updates alone, so that it
works equally under every orthogonal mask. Hyvarinen and Oja, "Independent Component Analysis: Algorithms and Applications"
(2000), with symmetric decorrelation, tanh.
"""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from shoal_lab.bench.attacks.lab import Rows

MIN_COPIES: Final = 8
"""Least coordinates with one zero pattern that count as a unit: its bias and its output weights, eleven for ten classes."""

STRAY: Final = 1e-3
"""Rate of moves outside a unit's pattern: small updates may round to zero in some coordinates of a unit alone."""


def silent_patterns(updates: Rows, most: int) -> NDArray[np.bool_]:
    """Return patterns of updates in which a hidden unit is active, (patterns, n), from masked one-image updates (n, d).

    A dead ReLU leaves all coordinates of its unit at zero, and its bias and output weights move together whenever it is
    alive. So their zero patterns are equal, and a permutation, with signs or without, keeps zero patterns.
    """
    moved = updates != 0
    packed = np.ascontiguousarray(np.packbits(moved, axis=0).T)
    keys = packed.view(np.dtype((np.void, packed.shape[1]))).ravel()
    _, first, copies = np.unique(keys, return_index=True, return_counts=True)
    active = moved[:, first].sum(0)
    likely = np.flatnonzero((copies >= MIN_COPIES) & (active > 0))
    # Patterns of rarely coloured pixels repeat across units too, but they are shorter than those of units.
    # Where several units are always alive, each pixel makes such a pattern too, so that there is room for more than units.
    chosen = likely[np.argsort(-active[likely], kind="stable")][: 3 * most + 1]
    return np.ascontiguousarray(moved[:, first[chosen]].T)


def by_silence(updates: Rows, patterns: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return the pattern that each masked coordinate belongs to, (d,), int64; -1 if it never moved or fits none.

    A coordinate of a unit moves only while the unit is alive, at a rate of its own; the likeliest pattern wins.
    """
    moved = (updates != 0).astype(np.float32)
    alive = patterns.astype(np.float32)
    count, active = moved.sum(0), np.maximum(alive.sum(1, keepdims=True), 1)
    inside = alive @ moved
    rate = np.clip(inside / active, 1e-6, 1 - 1e-6)
    likelihood = inside * np.log(rate) + (active - inside) * np.log1p(-rate) + (count - inside) * np.log(STRAY)
    labels = likelihood.argmax(0)
    fits = np.take_along_axis(inside, labels[None], 0)[0] >= 0.5 * count
    return np.asarray(np.where(fits & (count > 0), labels, -1), np.int64)


def by_activity(activity: NDArray[np.float64], groups: int) -> NDArray[np.int64]:
    """Return a group for each component, (k,), int64: those with similar sizes over the updates (n, k) are together."""
    from sklearn.cluster import KMeans

    sizes = np.abs(activity).T
    sizes = sizes - sizes.mean(1, keepdims=True)
    sizes /= np.linalg.norm(sizes, axis=1, keepdims=True) + 1e-12
    if len(sizes) <= groups:
        return np.arange(len(sizes))
    return np.asarray(KMeans(groups, n_init=1, random_state=0).fit(sizes).labels_, np.int64)


def share_assigned(labels: NDArray[np.int64], energies: NDArray[np.float64]) -> float:
    """Return the share of the vectors' energy that lies in the unit their group is matched to, under the best matching.

    Args:
        labels: group of each vector, (m,), int64; -1 for none, which counts as wrong.
        energies: share of each vector in each unit, (m, hidden): one 1 in the row of a copied coordinate.
    """
    from scipy.optimize import linear_sum_assignment

    total = float(energies.sum())
    if total <= 0 or labels.max(initial=-1) < 0:
        return 0.0
    groups = np.zeros((int(labels.max()) + 1, energies.shape[1]))
    np.add.at(groups, labels[labels >= 0], energies[labels >= 0])
    rows, columns = linear_sum_assignment(groups, maximize=True)
    return float(groups[rows, columns].sum()) / total


def neighbours(activity: Rows) -> NDArray[np.int64]:
    """Return for each column of ``activity`` (n, m) the other column with the largest absolute correlation, (m,)."""
    columns = activity - activity.mean(0)
    columns /= np.linalg.norm(columns, axis=0) + np.float32(1e-30)
    nearest = np.empty(columns.shape[1], np.int64)
    for start in range(0, len(nearest), 1024):
        part = np.abs(columns[:, start : start + 1024].T @ columns)
        part[np.arange(len(part)), np.arange(start, start + len(part))] = -1
        nearest[start : start + 1024] = part.argmax(1)
    return nearest


def agreement(nearest: NDArray[np.int64], energies: NDArray[np.float64]) -> float:
    """Return how likely a vector and its neighbour are of one hidden unit: the mean product of their energies.

    Args:
        nearest: index of each vector's neighbour, (m,), int64.
        energies: share of each vector in each unit, (m, hidden).
    """
    inside = energies.sum(1) > 0
    both = (energies * energies[nearest]).sum(1)
    return float(both[inside].mean()) if inside.any() else 0.0


def one_hot(unit: NDArray[np.int64], hidden: int) -> NDArray[np.float64]:
    """Return the energies (m, hidden) of coordinates of the given units, (m,), int64; a row of zeros for unit ``hidden``."""
    return np.asarray((unit[:, None] == np.arange(hidden)).astype(np.float64))


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


def independent(white: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return independent activities (n, k), a rotation of the ``white`` ones (n, k)."""
    n, k = white.shape
    z = white.astype(np.float32)
    w = np.eye(k)
    for _ in range(ITERATIONS):
        bent = np.tanh(z @ w.astype(np.float32))
        w = (z.T @ bent).astype(np.float64) / n - w * (1 - bent * bent).mean(0, dtype=np.float64)
        size, axes = np.linalg.eigh(w.T @ w)
        w = w @ (axes / np.sqrt(np.maximum(size, 1e-12))) @ axes.T
    return np.asarray(white @ w, np.float64)


def analyse(updates: Rows, most: int = 0, rng: np.random.Generator | None = None) -> Components:
    """Return the independent components of updates (n, d): at most ``most``, and half as many as updates or fewer.

    With ``rng`` it returns a random rotation of the principal components instead: the null, which has no analysis.
    """
    bound = max(2, len(updates) // 2)
    white, rows = whiten(updates, min(most, bound) if most else bound)
    if rng is None:
        activity = independent(white)
    else:
        activity = white @ np.linalg.qr(rng.standard_normal((white.shape[1], white.shape[1])))[0]
    return Components(activity, activity.T.astype(np.float32) @ rows)
