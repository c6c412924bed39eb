"""A Gram matrix that is extended with each upload, so that little work remains when a round's last update arrives."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.backend import Backend, NumpyBackend
from aggregator.numerics.errors import NumericsError
from aggregator.numerics.rows import Updates, bad_rows

BLOCK_ROWS: Final = 32
"""Number of new rows that are multiplied together: one by one, each would read all earlier rows again."""


class StreamingGram:
    """All dot products between the updates so far, equal to ``gram`` of them to 1e-6 of the vectors' lengths.

    Every ``BLOCK_ROWS`` new rows are multiplied with each other (syrk) and with all earlier rows (gemm). Besides the
    caller's rows, which may be memory maps, this takes 8 n^2 bytes for the products and at most 64 MiB for a column chunk.

    Args:
        length: coordinates d, at least 1.
        capacity: most rows n, at least 1.
        backend: numpy by default.
        store: shape (capacity, length), float32, a writable array or ``numpy.memmap`` into which rows are copied. Without
            it the caller's arrays are used and must not change.

    Raises:
        NumericsError: the arguments do not fit the above.
    """

    __slots__ = ("_backend", "_done", "_products", "_rows", "_store", "capacity", "length")

    def __init__(
        self,
        length: int,
        capacity: int,
        *,
        backend: Backend | None = None,
        store: NDArray[np.float32] | None = None,
    ) -> None:
        if length < 1 or capacity < 1:
            raise NumericsError(f"a Gram matrix of up to {capacity} rows of {length} coordinates")
        if store is not None and (store.shape != (capacity, length) or store.dtype != np.float32):
            raise NumericsError(
                f"the store has shape {store.shape} and dtype {store.dtype}, not {(capacity, length)} float32"
            )
        self.length = length
        self.capacity = capacity
        self._backend = backend or NumpyBackend()
        self._store = store
        self._rows: list[NDArray[np.float32]] = []
        self._products: NDArray[np.float64] = np.zeros((capacity, capacity))
        self._done = 0

    def __len__(self) -> int:
        """Return the number of rows so far."""
        return len(self._rows)

    def add(self, row: NDArray[np.float32]) -> int:
        """Add ``row``, shape (d,), float32, and return its position; NaN and infinities are found in ``result``.

        Raises:
            NumericsError: shape or dtype do not fit, or ``capacity`` rows are there already.
        """
        self._check(row)
        position = len(self._rows)
        if position == self.capacity:
            raise NumericsError(f"the Gram matrix has its {self.capacity} rows already")
        self._rows.append(self._kept(position, row))
        if len(self._rows) - self._done == BLOCK_ROWS:
            self._multiply()
        return position

    def replace(self, position: int, row: NDArray[np.float32]) -> None:
        """Replace an earlier row by ``row``, shape (d,), float32, in O(n d).

        Raises:
            NumericsError: shape or dtype do not fit, or there is no row at ``position``.
        """
        self._check(row)
        if not 0 <= position < len(self._rows):
            raise NumericsError(f"no row at position {position} of {len(self._rows)}")
        self._rows[position] = self._kept(position, row)
        if position < self._done:
            products = self._backend.products(self._between(0, self._done), [self._rows[position]])[:, 0]
            self._products[: self._done, position] = products
            self._products[position, : self._done] = products

    def result(self) -> NDArray[np.float64]:
        """Return all dot products so far in the order of arrival; more rows may follow.

        Returns:
            shape (n, n), float64, exactly symmetric, in new memory.

        Raises:
            NumericsError: no rows, NaN or infinities among them, or products beyond float32's range.
        """
        if not self._rows:
            raise NumericsError("a Gram matrix of no rows")
        self._multiply()
        products = self._products[: self._done, : self._done].copy()
        if not np.isfinite(products).all():
            raise NumericsError(f"dot products are not finite; rows with NaN or infinities: {bad_rows(self._rows)}")
        return products

    def _check(self, row: NDArray[np.float32]) -> None:
        if row.shape != (self.length,) or row.dtype != np.float32:
            raise NumericsError(f"row has shape {row.shape} and dtype {row.dtype}, not {(self.length,)} float32")

    def _kept(self, position: int, row: NDArray[np.float32]) -> NDArray[np.float32]:
        if self._store is None:
            return row
        self._store[position] = row
        kept: NDArray[np.float32] = self._store[position]
        return kept

    def _between(self, start: int, stop: int) -> Updates:
        return self._rows[start:stop] if self._store is None else self._store[start:stop]

    def _multiply(self) -> None:
        start, stop = self._done, len(self._rows)
        if start == stop:
            return
        block = self._between(start, stop)
        single = stop - start == 1  # `gram` takes at least two rows
        own = self._backend.products(block, block) if single else self._backend.gram(block)
        self._products[start:stop, start:stop] = own
        if start:
            cross = self._backend.products(self._between(0, start), block)
            self._products[:start, start:stop] = cross
            self._products[start:stop, :start] = cross.T
        self._done = stop
