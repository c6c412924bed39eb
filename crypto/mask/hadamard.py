"""An orthonormal Hadamard transform of vectors of any length, in blocks, without padding.

It adds and subtracts float32 in a fixed order and multiplies by a constant, so IEEE 754 gives the same bits on every
platform; a matrix product would not. Rounding adds a relative l2 error of 1e-7.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from crypto.mask.kernel import installed
from shoal.types import Float32Vector

MAX_BLOCK_BITS: Final = 12
"""Blocks of at most 4096 coordinates: two passes of six butterflies, and each coordinate spreads over 4096."""

_PASS_BITS: Final = 6
_CACHED: Final = 1 << 16
"""Coordinates that a pass works on at a time: 256 KB, twice, stay in the L2 cache."""


def transform(vector: Float32Vector) -> None:
    """Replace ``vector`` by its blocked Hadamard transform, which preserves norms and dot products.

    With B the largest power of two up to 4096 that is not above the length d, and n = floor(d / B): coordinate i below
    nB belongs to block i mod n and is its element floor(i / n); every block x becomes H x / sqrt(B), with Sylvester's
    H[a, b] = -1 to the number of ones in a & b. Where nB < d, the last B coordinates then do the same as one block.

    Args:
        vector: shape (d,), float32, C-contiguous, d at least 1; changed in place.
    """
    for start, stop in _windows(vector.size):
        _blocks(vector[start:stop], _block_bits(vector.size))


def untransform(vector: Float32Vector) -> None:
    """Undo `transform`: each block is its own inverse, so only the order of the windows is reversed.

    Args:
        vector: shape (d,), float32, C-contiguous; changed in place.
    """
    for start, stop in reversed(_windows(vector.size)):
        _blocks(vector[start:stop], _block_bits(vector.size))


def _block_bits(length: int) -> int:
    return min(length.bit_length() - 1, MAX_BLOCK_BITS)


def _windows(length: int) -> list[tuple[int, int]]:
    size = 1 << _block_bits(length)
    whole = length // size * size
    return [(0, whole)] if whole == length else [(0, whole), (length - size, length)]


def _blocks(vector: NDArray[np.float32], bits: int) -> None:
    """Transform in place the columns of ``vector``, shape (2**bits * n,), read as a matrix of n columns.

    The low bits of a row's number come first, since those rows are close in memory; then the high bits, by column slices.
    The compiled kernel adds the same numbers in the same order.
    """
    scale = np.float32(math.sqrt(0.5) ** bits)
    kernel = installed()
    if kernel is not None:
        kernel.blocks(vector, bits, scale)
    else:
        _passes(vector, bits, scale)


def _passes(vector: NDArray[np.float32], bits: int, scale: np.float32) -> None:
    low = min(bits, _PASS_BITS)
    row = vector.size >> bits
    step = max(_CACHED // (row << low), 1) * (row << low)
    work = np.empty(min(step, vector.size), dtype=np.float32)
    for start in range(0, vector.size, step):
        piece = vector[start : start + step]
        done = _butterflies(piece, work[: piece.size], row, low)
        if done is not piece or bits == low:
            np.multiply(done, scale if bits == low else np.float32(1), out=piece)
    if bits == low:
        return
    high = bits - low
    columns = vector.reshape(1 << high, -1)
    width = min(_CACHED >> high, columns.shape[1])
    room = np.empty((2, width << high), dtype=np.float32)
    for start in range(0, columns.shape[1], width):
        slab = columns[:, start : start + width]
        source, other = room[:, : slab.size]
        np.multiply(slab, scale, out=source.reshape(slab.shape))
        np.copyto(slab, _butterflies(source, other, slab.shape[1], high).reshape(slab.shape))


def _butterflies(source: NDArray[np.float32], other: NDArray[np.float32], half: int, count: int) -> NDArray[np.float32]:
    """Apply ``count`` butterflies to ``source``, the first ``half`` apart, and return the buffer that holds the result.

    Args:
        source: shape (m,); overwritten.
        other: shape (m,), a second buffer.
        half: distance of the pairs in the first butterfly; it doubles each time.
        count: number of butterflies.
    """
    for _ in range(count):
        pairs, results = source.reshape(-1, 2, half), other.reshape(-1, 2, half)
        np.add(pairs[:, 0], pairs[:, 1], out=results[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=results[:, 1])
        source, other, half = other, source, 2 * half
    return source
