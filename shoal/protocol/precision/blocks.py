"""``int8``: a float32 scale for each block of 256 coordinates, then each coordinate as a multiple of it from -127 to 127.

The largest coordinate of a block is 127 times its scale. Others are rounded at random to one of the two nearest multiples,
so that the expectation is the coordinate itself. The draws follow from the seed.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.errors import WireError
from shoal.protocol.precision.lengths import BLOCK, SCALE_BYTES
from shoal.protocol.precision.scales import checked, flushed
from shoal.protocol.precision.streams import WINDOW, fractions, windows
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
