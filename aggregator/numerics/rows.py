"""Updates as rows: an array, a memory map or a list of vectors, read without copying it as a whole."""

from __future__ import annotations

import itertools
import mmap
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.checks import NumericsError

Updates = NDArray[np.float32] | Sequence[NDArray[np.float32]]
"""shape (n, d), float32: an array, a ``numpy.memmap``, or n vectors of shape (d,)."""

CHUNK_COLUMNS: Final = 16_384
"""Columns of one product: enough for full speed, and so few that its float32 sums are exact to 1e-6."""

BUFFER_BYTES: Final = 32 << 20
"""Largest buffer for one chunk of rows that must be copied."""

RESIDENT_BYTES: Final = 16 << 20
"""Largest number of bytes of a `FilePages` in memory while its rows are read."""

FAULT_BYTES: Final = 64 << 10
"""Size of the aligned block that Linux maps around each page that is read."""


class FilePages(mmap.mmap):
    """A read-only, shared mapping of a file: its pages may be dropped at any time and are loaded again when read."""

    def drop(self) -> None:
        """Drop all pages from this process's memory; the system's page cache may still hold them."""
        self.madvise(mmap.MADV_DONTNEED)


def drop_pages(rows: Iterable[object]) -> None:
    """Drop the pages of every `FilePages` that ``rows`` are views of, arrays or memoryviews; other objects are ignored."""
    for pages in {id(p): p for row in rows if (p := _pages_of(row)) is not None}.values():
        pages.drop()


def read_once(rows: Updates, columns: int | None = None) -> Iterator[NDArray[np.float32]]:
    """Yield ``rows`` in order, and drop the pages of rows read so far each time they reach RESIDENT_BYTES.

    Args:
        rows: shape (n, d), float32.
        columns: number of coordinates of each row that the caller reads; all by default.
    """
    resident, first = 0, 0
    for number, row in enumerate(rows):
        yield row
        resident += FAULT_BYTES + 4 * (row.size if columns is None else columns)
        if resident >= RESIDENT_BYTES:
            drop_pages(rows[first : number + 1])
            resident, first = 0, number + 1
    drop_pages(rows[first:])


def _pages_of(row: object) -> FilePages | None:
    # `np.frombuffer` holds the mapping through a memoryview.
    while isinstance(row, np.ndarray | memoryview):
        row = row.base if isinstance(row, np.ndarray) else row.obj
    return row if isinstance(row, FilePages) else None


def check_rows(updates: Updates, *, least: int) -> tuple[int, int]:
    """Return (n, d) of ``updates``.

    Raises:
        NumericsError: fewer than ``least`` rows, no columns, ragged rows, or another dtype than float32.
    """
    if isinstance(updates, np.ndarray):
        if updates.ndim != 2:
            raise NumericsError(f"updates have shape {updates.shape}, not (n, d)")
        count, length = updates.shape
        dtypes = {updates.dtype}
    else:
        shapes = {row.shape for row in updates}
        if len(shapes) > 1 or any(len(shape) != 1 for shape in shapes):
            raise NumericsError(f"updates have rows of shapes {sorted(shapes)}, not one shape (d,)")
        count = len(updates)
        length = shapes.pop()[0] if shapes else 0
        dtypes = {row.dtype for row in updates}
    if count < least:
        raise NumericsError(f"{count} updates, but at least {least} are needed")
    if length < 1:
        raise NumericsError("updates have no coordinates")
    if dtypes != {np.dtype(np.float32)}:
        raise NumericsError(f"updates have dtype {', '.join(sorted(map(str, dtypes)))}, not float32")
    return count, length


def check_pair(updates: Updates, others: Updates) -> tuple[int, int]:
    """Return (n, k) of ``updates`` (n, d) and ``others`` (k, d), both float32, n and k at least 1.

    Raises:
        NumericsError: one of them is not as above, or their lengths differ.
    """
    count, length = check_rows(updates, least=1)
    other_count, other_length = check_rows(others, least=1)
    if length != other_length:
        raise NumericsError(f"updates have {length} coordinates, the other vectors {other_length}")
    return count, other_count


def chunk_width(count: int, length: int) -> int:
    """Return the columns of one chunk of ``count`` rows of ``length`` coordinates that must be copied together."""
    return max(256, min(CHUNK_COLUMNS, length, BUFFER_BYTES // (4 * count)))


def column_chunks(
    updates: Updates, *, copy: bool = False, width: int | None = None, buffers: Sequence[NDArray[np.float32]] = ()
) -> Iterator[NDArray[np.float32]]:
    """Yield ``updates`` from left to right in pieces of shape (n, w), float32, w at most ``CHUNK_COLUMNS``.

    Pieces are views if a matrix product can use them in place. Otherwise they share one buffer, so a piece is valid only
    until the next one.

    Args:
        updates: shape (n, d), checked by ``check_rows``.
        copy: always use the buffer.
        width: w, if two sets of rows must be cut at the same columns; by default as `chunk_width` says.
        buffers: shape (n, w) each, used in turn in place of the one buffer: a piece is valid until its buffer's turn comes again.
    """
    if isinstance(updates, np.ndarray) and not copy and not buffers and _usable_in_place(updates):
        plain = updates.view(np.ndarray)
        step = width or CHUNK_COLUMNS
        for start in range(0, plain.shape[1], step):
            yield plain[:, start : start + step]
        return
    count, length = len(updates), len(updates[0])
    width = width or chunk_width(count, length)
    turns = itertools.cycle(buffers or [np.empty((count, width), dtype=np.float32)])
    # Pages that all fit in memory are dropped once: after each piece, every piece would load them again.
    fits = count * (FAULT_BYTES + 4 * length) <= RESIDENT_BYTES
    for start in range(0, length, width):
        stop = min(start + width, length)
        piece = next(turns)[:, : stop - start]
        if isinstance(updates, np.ndarray):
            piece[:] = updates[:, start:stop]
        else:
            rows = updates if fits else read_once(updates, stop - start)
            for target, row in zip(piece, rows, strict=True):
                target[:] = row[start:stop]
        yield piece
    if fits:
        drop_pages(updates)


def chunk_pairs(updates: Updates, others: Updates) -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32]]]:
    """Yield the same columns of ``updates`` (n, d) and ``others`` (k, d), as ``column_chunks`` yields them."""
    width = chunk_width(max(len(updates), len(others)), len(updates[0]))
    return zip(column_chunks(updates, width=width), column_chunks(others, width=width), strict=True)


def bad_rows(updates: Updates) -> list[int]:
    """Return the positions of the rows of ``updates``, shape (n, d), float32, that hold NaN or infinities and are here."""
    return [
        position for position, row in enumerate(updates) if isinstance(row, np.ndarray) and not np.isfinite(row).all()
    ]


def _usable_in_place(updates: NDArray[np.float32]) -> bool:
    # The layouts that BLAS takes: contiguous rows which do not overlap, as those of a broadcast array do.
    row_stride, column_stride = updates.strides
    return updates.flags.aligned and column_stride == updates.itemsize and row_stride >= updates.shape[1] * 4
