"""``eden4`` and ``eden2``: a public random rotation, then the best quantiser of a normal distribution with 16 or 4 levels.

After random signs and Hadamard blocks the coordinates of any vector are nearly normal, so one set of levels fits all. The
scale |x|^2 / <x, q> makes the expectation over the rotations the vector itself: Vargaftik et al., "EDEN:
Communication-Efficient and Robust Distributed Mean Estimation for Federated Learning" (ICML 2022), with blocks in place of
one large transform. The seed differs for each upload, so that the errors of a mean's devices average out.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.errors import WireError
from shoal.protocol.precision.hadamard import transform, untransform
from shoal.protocol.precision.lengths import SCALE_BYTES
from shoal.protocol.precision.scales import checked, flushed
from shoal.protocol.precision.streams import flip_signs, windows
from shoal.types import Float32Vector

_HALF: Final[Mapping[int, tuple[float, ...]]] = MappingProxyType(
    {
        2: (0.452780035, 1.510417608),
        4: (0.12839503, 0.388048299, 0.656759119, 0.942340456, 1.256231197, 1.618046386, 2.069017227, 2.732589571),
    }
)
"""Positive levels of the Lloyd-Max quantiser of a standard normal distribution, by bits."""


def levels(bits: int) -> Float32Vector:
    """Return the 2**bits levels, float32, ascending."""
    half = np.array(_HALF[bits], np.float32)
    return np.concatenate([-half[::-1], half])


def encode(vector: Float32Vector, bits: int, seed: bytes) -> bytes:
    """Return a finite vector (d,) float32, d at least 1, as a scale and one level a coordinate.

    Raises:
        IntegrityError: the vector is too long for a scale.
    """
    flushed(np.abs(vector))  # the transform of larger coordinates could overflow
    rotated = vector.copy()
    flip_signs(rotated, seed)
    transform(rotated)
    squared = sum(_dot(rotated[span], rotated[span]) for span in windows(rotated.size))
    spread = np.sqrt(squared / rotated.size)
    centres = levels(bits)
    bounds = ((centres[1:] + centres[:-1]) / 2 * spread).astype(np.float32)
    index = np.empty(rotated.size, np.uint8)
    along = 0.0
    for span in windows(rotated.size):
        index[span] = np.searchsorted(bounds, rotated[span])
        along += _dot(rotated[span], centres[index[span]])
    scale = flushed(np.array([squared / along if along else 0.0]).astype("<f4"))
    return scale.tobytes() + _packed(index, bits).tobytes()


def decode(data: memoryview, length: int, bits: int, seed: bytes) -> Float32Vector:
    """Return the vector (d,) float32 of bytes of the right number.

    Raises:
        WireError: the scale is out of range, or the bits after the last coordinate are not zero.
    """
    (scale,) = checked(np.frombuffer(data[:SCALE_BYTES], "<f4"))
    index = _unpacked(np.frombuffer(data[SCALE_BYTES:], np.uint8), length, bits)
    out: Float32Vector = (levels(bits) * scale)[index]
    untransform(out)
    flip_signs(out, seed)
    return out


def _dot(one: Float32Vector, other: Float32Vector) -> float:
    return float(np.dot(one.astype(np.float64), other.astype(np.float64)))


def _packed(index: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Return 8 / bits levels a byte, the first in the lowest bits."""
    each = 8 // bits
    whole = np.zeros(-(-index.size // each) * each, np.uint8)
    whole[: index.size] = index
    out = np.zeros(whole.size // each, np.uint8)
    for place in range(each):
        out |= whole[place::each] << np.uint8(bits * place)
    return out


def _unpacked(data: NDArray[np.uint8], length: int, bits: int) -> NDArray[np.uint8]:
    each = 8 // bits
    out = np.empty(data.size * each, np.uint8)
    for place in range(each):
        out[place::each] = (data >> np.uint8(bits * place)) & np.uint8((1 << bits) - 1)
    if out[length:].any():
        raise WireError("bits after the last coordinate")
    return out[:length]
