"""Dot products and cosines between updates (cfl Eq. 13), in one pass over the coordinates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.backend import Backend, NumpyBackend
from aggregator.numerics.errors import NumericsError
from aggregator.numerics.parted import PartedVector, is_parted
from aggregator.numerics.rows import Updates, bad_rows, check_rows, column_chunks

SAFE_SQUARED_NORM: Final = (1e-24, 1e30)
"""Range of squared norms within which a row's squares neither vanish nor overflow in float32; other rows are scaled first."""


def gram(updates: Updates, *, backend: Backend | None = None) -> NDArray[np.float64]:
    """Return all dot products between ``updates``.

    Args:
        updates: shape (n, d), float32, finite, n at least 2.
        backend: numpy by default.

    Returns:
        shape (n, n), float64, exactly symmetric.

    Raises:
        NumericsError: wrong shape or dtype, NaN or infinities, or products beyond float32's range.
    """
    return _finite(_gram(updates, backend), updates)


def precise_gram(updates: Updates) -> NDArray[np.float64]:
    """Return ``gram`` of ``updates`` with float64 products: half as fast, errors of 1e-15 instead of 1e-7.

    A singular value is the root of an eigenvalue, so an error of 1e-7 in the products becomes up to 3e-4 of the largest
    singular value.

    Args:
        updates: shape (n, d), float32, finite, n at least 2.

    Returns:
        shape (n, n), float64, exactly symmetric.

    Raises:
        NumericsError: as ``gram``.
    """
    count, _ = check_rows(updates, least=2)
    if is_parted(updates):
        return _finite(updates[0].space.gram(updates, precise=True), ())
    total = np.zeros((count, count))
    with np.errstate(over="ignore", invalid="ignore"):
        for chunk in column_chunks(updates):
            wide = chunk.astype(np.float64)
            total += wide @ wide.T
    return _finite(total, updates)


def products(
    updates: Updates, others: Sequence[NDArray[np.float32]], *, backend: Backend | None = None
) -> NDArray[np.float64]:
    """Return the dot products of ``updates`` (n, d) with the vectors ``others``, k of (d,), float32, as (n, k), float64."""
    if is_parted(updates) and is_parted(others):
        return updates[0].space.products(updates, others)
    return (backend or NumpyBackend()).products(updates, np.stack(others))


def _gram(updates: Updates, backend: Backend | None) -> NDArray[np.float64]:
    if is_parted(updates):
        if len(updates) < 2:
            raise NumericsError(f"{len(updates)} updates, but at least 2 are needed")
        return updates[0].space.gram(updates)
    return (backend or NumpyBackend()).gram(updates)


def _finite(products: NDArray[np.float64], updates: Updates) -> NDArray[np.float64]:
    if not np.isfinite(products).all():
        raise NumericsError(f"dot products are not finite; rows with NaN or infinities: {bad_rows(updates)}")
    return products


def cosine_from_gram(products: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the cosines of the vectors with the given dot products.

    Args:
        products: shape (n, n), float64, symmetric, finite.

    Returns:
        shape (n, n), float64, symmetric, in [-1, 1]; 1 on the diagonal, but a zero vector has cosine 0 with
        every vector and with itself.

    Raises:
        NumericsError: not square, not finite, or a negative diagonal.
    """
    if products.ndim != 2 or products.shape[0] != products.shape[1]:
        raise NumericsError(f"a Gram matrix has shape (n, n), not {products.shape}")
    if not np.isfinite(products).all():
        raise NumericsError("the Gram matrix holds NaN or infinities")
    squared = np.diagonal(products)
    if (squared < 0).any():
        raise NumericsError("a Gram matrix has no negative diagonal")
    zero = squared == 0
    norms = np.sqrt(np.where(zero, 1.0, squared))
    cosines = products / norms[:, None] / norms[None, :]
    # Two divisions round differently on the two sides of the diagonal.
    cosines = np.clip((cosines + cosines.T) / 2, -1.0, 1.0)
    cosines[zero, :] = 0.0
    cosines[:, zero] = 0.0
    np.fill_diagonal(cosines, np.where(zero, 0.0, 1.0))
    return cosines


def cosine_matrix(updates: Updates, *, backend: Backend | None = None) -> NDArray[np.float64]:
    """Return the cosine of every pair of ``updates`` (cfl Eq. 13).

    Args:
        updates: shape (n, d), float32, finite, n at least 2; read in column chunks, so a ``numpy.memmap`` or a list
            of rows is never held in memory at once.
        backend: numpy by default.

    Returns:
        shape (n, n), float64, exactly symmetric, in [-1, 1]; 1 on the diagonal, but a zero update has cosine 0 with
        every update and with itself.

    Raises:
        NumericsError: fewer than two rows, another dtype than float32, NaN or infinities.
    """
    products = _gram(updates, backend)
    squared = np.diagonal(products)
    low, high = SAFE_SQUARED_NORM
    unsafe = ~((squared > low) & (squared < high))
    if unsafe.any():
        products = _gram(_rescale(updates, unsafe), backend)
    return cosine_from_gram(products)


def _rescale(updates: Updates, unsafe: NDArray[np.bool_]) -> list[Any]:
    rows: list[Any] = []
    for position, row in enumerate(updates):
        if unsafe[position] and isinstance(row, PartedVector):
            rows.append(row.scaled_to_one())
        elif unsafe[position]:
            peak = np.abs(row).max()
            if not np.isfinite(peak):
                raise NumericsError(f"updates hold NaN or infinities in rows {bad_rows(updates)}")
            # float64: the reciprocal of a subnormal overflows float32.
            rows.append((row / np.float64(peak)).astype(np.float32) if peak > 0 else row)
        else:
            rows.append(row)
    return rows
