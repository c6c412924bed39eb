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
_BUFFERED: Final = 256
"""Elements of numpy's buffers meanwhile. With the usual 8192 it copies all runs below some 2000 there and back, which takes
longer than to add them."""


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
    high, group = bits - low, vector.size >> bits << low
    room = np.empty((2, min(max(_CACHED, group), vector.size)), dtype=np.float32)
    step = room.shape[1] // group * group
    before = np.setbufsize(_BUFFERED)
    try:
        for start in range(0, vector.size, step):
            _pass(vector[start : start + step].reshape(-1, 1 << low, group >> low), low, room)
        np.multiply(vector, scale, out=vector)
        columns = vector.reshape(1, 1 << high, -1)
        width = max(_CACHED >> high, 1)
        for start in range(0, columns.shape[2], width):
            _pass(columns[..., start : start + width], high, room)
    finally:
        np.setbufsize(before)


def _pass(view: NDArray[np.float32], bits: int, room: NDArray[np.float32]) -> None:
    """Apply ``bits`` butterflies to the rows of each matrix in ``view``, shape (m, 2**bits, n), neighbours first, in place.

    They work on a copy in which the lowest bit of a row's number is the first axis: all pairs are long runs there.

    Args:
        view: changed in place.
        bits: number of butterflies.
        room: shape (2, at least m * n * 2**bits), two buffers.
    """
    count, rows, width = view.shape
    bits_first = view.reshape(count, *(2,) * bits, width).transpose(*range(bits, 0, -1), 0, bits + 1)
    source, other = room[:, : count * rows * width]
    np.copyto(source.reshape(bits_first.shape), bits_first)
    for bit in range(bits):
        pairs, results = source.reshape(1 << bit, 2, -1), other.reshape(1 << bit, 2, -1)
        np.add(pairs[:, 0], pairs[:, 1], out=results[:, 0])
        np.subtract(pairs[:, 0], pairs[:, 1], out=results[:, 1])
        source, other = other, source
    np.copyto(bits_first, source.reshape(bits_first.shape))
