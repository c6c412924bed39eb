"""``int8``: a float32 scale for each block of 256 coordinates, then each coordinate as a multiple of it from -127 to 127.

The largest coordinate of a block is 127 times its scale. Others are rounded at random to one of the two nearest multiples,
so that the expectation is the coordinate itself. The draws follow from the seed.

A scale is 0, or in a range in which no decoded coordinate overflows or is a denormal number: some processors drop denormal
numbers, and all devices must decode a mean to the same bits. The draws are a counter stream of the public seed, SHAKE-256 of seed
and window number, equal on every platform.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.digests import shake_256
from shoal.errors import IntegrityError, WireError
from shoal.protocol.precision.lengths import BLOCK, SCALE_BYTES
from shoal.types import Float32Vector

TOP: Final = 127


def encode(vector: Float32Vector, seed: bytes) -> bytes:
    """Return a finite vector (d,) float32 as scales and integers.

    Raises:
        IntegrityError: a coordinate is too large for a scale.
    """
    count = -(-vector.size // BLOCK)
    out = np.empty(SCALE_BYTES * count + vector.size, np.uint8)
    scales, steps = out[: SCALE_BYTES * count].view("<f4"), out[SCALE_BYTES * count :].view(np.int8)
    for number, span in enumerate(windows(vector.size)):
        first = number * (WINDOW // BLOCK)
        largest: Float32Vector = np.maximum.reduceat(np.abs(vector[span]), np.arange(0, vector[span].size, BLOCK))
        scales[first : first + largest.size] = flushed(largest / np.float32(TOP))
        steps[span] = _rounded(
            vector[span], scales[first : first + largest.size], fractions(seed, number, largest.size * BLOCK)
        )
    return out.tobytes()


def _rounded(piece: Float32Vector, scales: Float32Vector, draws: Float32Vector) -> NDArray[np.int8]:
    wide = np.repeat(scales, BLOCK)[: piece.size]
    multiples = np.divide(piece, wide, out=np.zeros_like(piece), where=wide > 0)
    return np.clip(np.floor(multiples + draws[: piece.size]), -TOP, TOP).astype(np.int8)


def decode(data: memoryview, length: int) -> Float32Vector:
    """Return the vector (d,) float32 of bytes of the right number.

    Raises:
        WireError: a scale is out of range, or an integer is -128.
    """
    cut = SCALE_BYTES * -(-length // BLOCK)
    scales = checked(np.frombuffer(data[:cut], "<f4"))
    steps = np.frombuffer(data[cut:], np.int8)
    if steps.min(initial=0) < -TOP:
        raise WireError("an int8 coordinate of -128")
    out = steps.astype(np.float32)
    for number, span in enumerate(windows(length)):
        first = number * (WINDOW // BLOCK)
        out[span] *= np.repeat(scales[first : first + WINDOW // BLOCK], BLOCK)[: out[span].size]
    return out


LEAST: Final = np.float32(2.0**-90)
MOST: Final = np.float32(2.0**100)


def flushed(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return scales, float32, with those below `LEAST` as 0.

    Raises:
        IntegrityError: one is above `MOST`.
    """
    if scales.max(initial=0) > MOST:
        raise IntegrityError("a vector too long to encode", hint="local training diverged: lower the step size")
    return np.where(scales < LEAST, np.float32(0), scales)


def checked(scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return received scales, float32.

    Raises:
        WireError: one is NaN, negative or out of range.
    """
    allowed = (scales == 0) | ((scales >= LEAST) & (scales <= MOST))
    if not allowed.all() or np.signbit(scales).any():
        raise WireError("a scale out of range")
    return scales.astype(np.float32)


WINDOW: Final = 1 << 16
"""Coordinates that are worked on at a time; a multiple of the block of ``int8``. The work memory does not grow with d."""
_LABEL: Final = b"shoal/v1/precision/stream\0"


def windows(length: int) -> Iterator[slice]:
    """Return the windows of a vector of ``length`` coordinates, in order."""
    return (slice(start, min(start + WINDOW, length)) for start in range(0, length, WINDOW))


def fractions(seed: bytes, window: int, count: int) -> Float32Vector:
    """Return ``count`` draws, float32, from the 65,536 midpoints of [0, 1)."""
    name = _LABEL + len(seed).to_bytes(4, "little") + seed + b"rounding\0" + window.to_bytes(8, "little")
    words = np.frombuffer(shake_256(name, 2 * count), "<u2").astype(np.float32)
    return (words + np.float32(0.5)) * np.float32(2.0**-16)
