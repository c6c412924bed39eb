"""A dense secret orthogonal matrix before the mask, for vectors whose non-zero coordinates all devices have at the same places.

The masks are sparse transforms: from few non-zero coordinates a rotation makes small integers times the values, and a
permutation shows them as they are. The matrix Q is uniformly distributed over all orthogonal matrices, and new in every round.
So nothing follows from vectors under it but their norms and dot products, whatever is known of the mask behind it.

Q = H_n diag(1, H_n-1) ... diag(1, ..., 1, H_1), after Diaconis and Shahshahani (The subgroup algorithm for generating uniform
random variables, 1987). H_k is minus or plus a Householder reflection, and maps the first of k unit vectors to a direction x
that is uniformly distributed: the direction of k independent Gaussian numbers. The squared lengths of m pairs of them, divided by
their sum, are distributed as the m distances between 0, m - 1 sorted uniform numbers, and 1. So x takes no logarithm.

All devices must get the same bits: float64, +, -, *, / and square root alone, and sums by halves in a fixed order.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from crypto.mask.derivation import MaskKey, subkey
from crypto.mask.secret import MaskSecret
from crypto.mask.stream import keystream
from shoal import limits
from shoal.errors import UsageError
from shoal.types import Float32Vector

CLEAR: Final = "none"
"""The mode that hides nothing, with or without a matrix."""
SPARE: Final = 256
"""Points that are drawn beyond twice the number that is needed: of all, the share pi / 4 lies in the circle."""


class Dense:
    """The matrix on the first n of a vector's coordinates, then the mask on all of them.

    Attributes:
        length: coordinates of the whole vector.
    """

    __slots__ = ("_ahead", "_key", "_normals", "_signs", "length")

    def __init__(self, key: MaskKey, directions: NDArray[np.float64]) -> None:
        """Store the mask, and reflections from directions (n, w), row k - 1 zero but for its k coordinates before n."""
        size = len(directions)
        rows, heads = np.arange(size), np.arange(size)[::-1]
        lengths = np.sqrt(_sums(directions * directions))
        self._signs = -np.copysign(1.0, directions[rows, heads])
        directions[rows, heads] -= self._signs * lengths
        self._ahead = 2.0 / _sums(directions * directions)
        self._normals, self._key, self.length = directions, key, key.length

    def apply(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the masked ``source`` to ``out``, both shape (length,), float32."""
        work = source.copy()
        work[: len(self._normals)] = self._reflected(source, range(len(self._normals)))
        self._key.apply(work, out)

    def invert(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the unmasked ``source`` to ``out``, both shape (length,), float32."""
        self._key.invert(source, out)
        out[: len(self._normals)] = self._reflected(out, reversed(range(len(self._normals))))

    def _reflected(self, vector: Float32Vector, order: Iterable[int]) -> NDArray[np.float64]:
        size, width = self._normals.shape
        found = np.zeros(width)
        found[:size] = vector[:size]
        for at in order:
            normal = self._normals[at]
            found -= normal * (self._ahead[at] * _sums(normal * found))
            found[size - 1 - at :] *= self._signs[at]
        return found[:size]

    def __repr__(self) -> str:
        return f"Dense(length={self.length}, size={len(self._normals)}, matrix=<redacted>)"


def behind_matrix(key: MaskKey, secret: MaskSecret, size: int) -> MaskKey:
    """Return a mask that multiplies the first ``size`` coordinates by a secret orthogonal matrix, and then masks as ``key``.

    It has the key id of ``key``. Mode ``none`` has no matrix. It takes some 10 ms at size 512.

    Args:
        key: the mask of a round.
        secret: the one that ``key`` was derived from.
        size: 1 to `limits.MAX_STATISTICS`, and at most ``key.length``.

    Raises:
        UsageError: the size is out of range.
    """
    if not 1 <= size <= min(key.length, limits.MAX_STATISTICS):
        raise UsageError(f"a matrix of {size} rows before a mask of {key.length} coordinates")
    if key.context.mode == CLEAR:
        return key
    circle = subkey(secret, key.context, "dense", size, "circle")
    lengths = subkey(secret, key.context, "dense", size, "lengths")
    return dataclasses.replace(key, transforms=(Dense(key, directions(circle, lengths, size)),), matrix=size)


def directions(circle: bytes, lengths: bytes, size: int) -> NDArray[np.float64]:
    """Return uniformly distributed directions in 1 to ``size`` dimensions, each times the same or a shorter length than 1.

    Args:
        circle: the 32-byte key of points in the circle.
        lengths: the 32-byte key of uniform numbers.
        size: n.

    Returns:
        shape (n, w), w the first power of two from n on; row k - 1 has its k coordinates in columns n - k to n - 1.
    """
    halves = [-(-k // 2) for k in range(1, size + 1)]
    total = sum(halves)
    points = 2.0 * _uniform(circle, 2 * (2 * total + SPARE)).reshape(-1, 2) - 1.0 + 2.0**-53
    squares = points[:, 0] * points[:, 0] + points[:, 1] * points[:, 1]
    inside = np.flatnonzero(squares < 1.0)[:total]
    points = points[inside] / np.sqrt(squares[inside])[:, None]
    cuts = _uniform(lengths, total)
    found = np.zeros((size, 1 << (size - 1).bit_length()))
    at = 0
    for k, half in enumerate(halves, 1):
        parts = np.diff(np.sort(cuts[at : at + half - 1]), prepend=0.0, append=1.0)
        pairs = points[at : at + half] * np.sqrt(parts)[:, None]
        found[k - 1, size - k : size] = pairs.reshape(-1)[:k]
        at += half
    return found


def _uniform(key: bytes, count: int) -> NDArray[np.float64]:
    """Return multiples of 2^-53 from 0 on and below 1, from the upper 53 bits of each little-endian u64 of a key stream."""
    return (keystream(key, 8 * count).view("<u8") >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _sums(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the sums along the last axis, of a power of two: the upper half is added to the lower one until one is left."""
    while (half := values.shape[-1] // 2) > 0:
        values = values[..., :half] + values[..., half:]
    return values[..., 0]
