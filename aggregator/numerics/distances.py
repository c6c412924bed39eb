"""Squared distances of updates to centres (FeSEM's l2 assignment, a baseline of fedgroup)."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.backend import Backend, NumpyBackend
from aggregator.numerics.errors import NumericsError
from aggregator.numerics.rows import BUFFER_BYTES, Updates, bad_rows, check_pair, column_chunks


def squared_distances(updates: Updates, centres: Updates, *, backend: Backend | None = None) -> NDArray[np.float64]:
    """Return the squared l2 distance of every update to every centre.

    The centres' mean is first subtracted from all vectors, which changes no distance. Without it the digits of
    |a|^2 - 2 a.c + |c|^2 would cancel for vectors that are long and close together, as whole models are.

    Args:
        updates: shape (n, d), float32, finite, n at least 1; read a few rows at a time, so they may be on disk.
        centres: shape (k, d), float32, finite, k at least 1.
        backend: backend for the products; numpy by default.

    Returns:
        shape (n, k), float64, not negative.

    Raises:
        NumericsError: the arguments do not fit the above, or a distance leaves float32's range.
    """
    count, centre_count = check_pair(updates, centres)
    chosen = backend or NumpyBackend()
    length = len(centres[0])
    with np.errstate(over="ignore", invalid="ignore"):
        middle = np.mean(centres, axis=0, dtype=np.float64).astype(np.float32)
        moved_centres = np.stack([centre - middle for centre in centres])
        centre_squares = _squares(moved_centres)
        distances = np.empty((count, centre_count))
        height = max(1, BUFFER_BYTES // (4 * length))
        for start in range(0, count, height):
            moved = np.stack([row - middle for row in updates[start : start + height]])
            products = chosen.products(moved, moved_centres)
            distances[start : start + height] = _squares(moved)[:, None] - 2.0 * products + centre_squares
    if not np.isfinite(distances).all():
        raise NumericsError(
            f"distances are not finite; rows with NaN or infinities: updates {bad_rows(updates)}, "
            f"centres {bad_rows(centres)}"
        )
    # Rounding can make the distance of two equal vectors slightly negative.
    return np.maximum(distances, 0.0, out=distances)


def _squares(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    total = np.zeros(len(rows))
    for chunk in column_chunks(rows):
        total += np.einsum("ij,ij->i", chunk, chunk)
    return total
