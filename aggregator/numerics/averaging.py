"""Weighted means of updates: rows in the given order, one float32 accumulator, the same bits every time.

Products and sums are separate operations on single elements, so no result depends on a coordinate's position: the mean of
permuted vectors is the permuted mean bit for bit. A round replayed after a crash gives the same bits as before.
"""

from __future__ import annotations

import math
from typing import Final, Protocol

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

    The bits are those of ``StreamingMean`` fed with the same rows in the same order.

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
    for factor in factors:  # as StreamingMean does: sum() compensates for rounding from Python 3.12 on
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
            finite = finite and _is_finite(piece)
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


def mean_into(mean: RunningMean, updates: Updates, weights: NDArray[np.float64]) -> NDArray[np.float32]:
    """Add ``updates`` (n, d), float32, under ``weights`` (n,), float64, to ``mean`` and return it, (d,), float32.

    Raises:
        NumericsError: as ``weighted_mean``.
    """
    checked = check_weights(weights, len(updates))
    for row, weight in zip(read_once(updates), checked, strict=True):
        mean.add(row, float(weight))
    try:
        return mean.result()
    except NumericsError:
        raise NumericsError(f"the mean is not finite; rows with NaN or infinities: {bad_rows(updates)}") from None


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
        raise NumericsError(_weight_message(float(values[position]), f"weight {position}"))
    if not values.any():
        raise NumericsError("all weights are 0")
    return values


class RunningMean(Protocol):
    """A weighted mean that takes one update at a time; every backend has one, with the same bits.

    Attributes:
        count: updates so far.
        total_weight: their weights' sum.
    """

    count: int
    total_weight: float

    def add(self, update: NDArray[np.float32], weight: float = 1.0) -> None:
        """Add ``update``, shape (d,), float32, with ``weight``."""
        ...

    def result(self) -> NDArray[np.float32]:
        """Return the mean so far, shape (d,), float32, in new memory."""
        ...


class StreamingMean:
    """A weighted mean that takes one update at a time and holds one vector.

    Args:
        length: coordinates d, at least 1.
    """

    __slots__ = ("_product", "_sum", "count", "total_weight")

    def __init__(self, length: int) -> None:
        if length < 1:
            raise NumericsError(f"a mean of {length} coordinates")
        self._sum: NDArray[np.float32] = np.zeros(length, dtype=np.float32)
        self._product: NDArray[np.float32] = np.empty(min(length, BLOCK_COLUMNS), dtype=np.float32)
        self.count = 0
        self.total_weight = 0.0

    def add(self, update: NDArray[np.float32], weight: float = 1.0) -> None:
        """Add ``update`` with ``weight``; NaN and infinities are found in ``result``.

        Args:
            update: shape (d,), float32.
            weight: 0, or from ``MIN_WEIGHT`` to ``MAX_WEIGHT``.

        Raises:
            NumericsError: shape, dtype or weight do not fit; the mean is unchanged.
        """
        check_summand(update, weight, self._sum.size)
        with np.errstate(over="ignore", invalid="ignore"):
            for start in range(0, self._sum.size, BLOCK_COLUMNS):
                stop = start + BLOCK_COLUMNS
                _add_product(self._sum[start:stop], update[start:stop], weight, self._product)
        self.count += 1
        self.total_weight += weight

    def result(self) -> NDArray[np.float32]:
        """Return the mean so far, shape (d,), float32, in new memory.

        Raises:
            NumericsError: no weight yet, or a coordinate is not finite: an update held NaN or infinities, or the sum
                left float32's range.
        """
        return mean_of_sum(self._sum, self.total_weight)


def check_summand(update: NDArray[np.float32], weight: float, length: int) -> None:
    """Check that a mean of ``length`` coordinates can use an update and its weight.

    Raises:
        NumericsError: the update is not of shape (length,), float32, or the weight is out of range.
    """
    if update.shape != (length,) or update.dtype != np.float32:
        raise NumericsError(f"update has shape {update.shape} and dtype {update.dtype}, not {(length,)} float32")
    if not (weight == 0 or MIN_WEIGHT <= weight <= MAX_WEIGHT):
        raise NumericsError(_weight_message(weight, "weight"))


def mean_of_sum(total: NDArray[np.float32], total_weight: float) -> NDArray[np.float32]:
    """Return ``total``, shape (d,), float32, over ``total_weight``, in new memory.

    Raises:
        NumericsError: no weight, or a coordinate is not finite.
    """
    if not total_weight > 0:
        raise NumericsError("a mean needs at least one update of positive weight")
    with np.errstate(over="ignore", invalid="ignore"):
        mean: NDArray[np.float32] = total / np.float32(total_weight)
        if not _is_finite(mean):
            raise NumericsError("the mean is not finite")
    return mean


def _is_finite(vector: NDArray[np.float32]) -> bool:
    """Return whether every coordinate is finite. A finite sum, which is quicker, proves it; an infinite one may be overflow."""
    return bool(np.isfinite(vector.sum()) or np.isfinite(vector).all())


def _add_product(
    total: NDArray[np.float32], piece: NDArray[np.float32], weight: float, product: NDArray[np.float32]
) -> None:
    # A product with 1 changes no bit and costs a pass over the memory.
    if weight != 1.0:
        piece = np.multiply(piece, np.float32(weight), out=product[: total.size])
    np.add(total, piece, out=total)


def _weight_message(weight: float, what: str) -> str:
    shown = f"{weight:g}" if math.isfinite(weight) else str(weight)
    return f"{what} is {shown}, neither 0 nor from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}"
