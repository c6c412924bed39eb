"""Weighted means of updates: rows in the given order, one float32 accumulator, the same bits every time.

Products and sums are separate operations on single elements, so no result depends on a coordinate's position: the mean of
permuted vectors is the permuted mean bit for bit. A round replayed after a crash gives the same bits as before.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.checks import NumericsError
from aggregator.numerics.parted import is_parted, mean_of
from aggregator.numerics.rows import Updates, bad_rows, check_rows, read_once

BLOCK_COLUMNS: Final = 524_288
"""Columns of one pass: accumulator and product (4 MB) stay in the last-level cache, and rows are read in long pieces."""

MIN_WEIGHT: Final = 1e-12
MAX_WEIGHT: Final = 1e12


def weighted_mean(updates: Updates, weights: NDArray[np.float64]) -> NDArray[np.float32]:
    """Return the weighted mean of ``updates`` (cfl Alg. 2, fedgroup Alg. 1; uniform weights for ifca Alg. 1).

    Args:
        updates: shape (n, d), float32, finite, n at least 1.
        weights: shape (n,), float64; each 0 or from ``MIN_WEIGHT`` to ``MAX_WEIGHT``, not all 0.

    Returns:
        shape (d,), float32.

    Raises:
        NumericsError: the arguments do not fit the above, or the sum leaves float32's range.
    """
    count, length = check_rows(updates, least=1)
    factors = [float(weight) for weight in check_weights(weights, count)]
    if is_parted(updates):
        return mean_of(updates, weights)  # type: ignore[return-value]
    total_weight = 0.0
    for factor in factors:  # sum() compensates for rounding from Python 3.12 on
        total_weight += factor
    mean = np.zeros(length, dtype=np.float32)
    product = np.empty(min(length, BLOCK_COLUMNS), dtype=np.float32)
    finite = True
    # Overflow shows in the mean, which is checked; a warning by numpy would only repeat it.
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, length, BLOCK_COLUMNS):
            piece = mean[start : start + BLOCK_COLUMNS]
            for row, factor in zip(read_once(updates, piece.size), factors, strict=True):
                _add_product(piece, row[start : start + BLOCK_COLUMNS], factor, product)
            np.divide(piece, np.float32(total_weight), out=piece)
            # A finite sum, which is quicker, proves that all coordinates are; an infinite one may be overflow.
            finite = finite and bool(np.isfinite(piece.sum()) or np.isfinite(piece).all())
    if not finite:
        raise NumericsError(f"the mean is not finite; rows with NaN or infinities: {bad_rows(updates)}")
    return mean


def capped_weights(weights: NDArray[np.float64], cap: float) -> NDArray[np.float64]:
    """Return ``weights`` with none above ``cap`` times their median, so that no single update dominates a mean.

    The median is that of the weights above 0. Of two weights it is their mean, so a cap of 2 or more changes neither.

    Args:
        weights: shape (n,), float64, none negative.
        cap: at least 1; 0 changes nothing.

    Returns:
        shape (n,), float64; weights up to the limit are unchanged, bit for bit.
    """
    values = np.asarray(weights, np.float64)
    positive = values[values > 0]
    if not cap or not len(positive):
        return values
    return np.minimum(values, cap * float(np.median(positive)))


def check_weights(weights: NDArray[np.float64], count: int) -> NDArray[np.float64]:
    """Return ``weights``, shape (count,), float64, if a mean can use them.

    Raises:
        NumericsError: wrong shape, a weight that is negative, not finite or out of range, or all weights 0.
    """
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != (count,):
        raise NumericsError(f"weights have shape {values.shape}, not ({count},)")
    # Negated, since NaN fails every comparison and must be refused too.
    for position in np.flatnonzero(~((values == 0) | ((values >= MIN_WEIGHT) & (values <= MAX_WEIGHT)))):
        raise NumericsError(
            f"weight {position} is {values[position]:g}, neither 0 nor from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
        )
    if not values.any():
        raise NumericsError("all weights are 0")
    return values


def _add_product(
    total: NDArray[np.float32], piece: NDArray[np.float32], weight: float, product: NDArray[np.float32]
) -> None:
    # A product with 1 changes no bit and costs a pass over the memory.
    if weight != 1.0:
        piece = np.multiply(piece, np.float32(weight), out=product[: total.size])
    np.add(total, piece, out=total)
