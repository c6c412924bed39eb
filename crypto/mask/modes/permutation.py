"""Mode ``permutation``: permute the coordinates of each segment, as the clustering papers propose."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from crypto.mask.modes.base import Mode, Subkey
from crypto.mask.stream import permutation
from shoal.types import Float32Vector

_STEP: Final = 131_072
"""Indices that are widened to pointer size at a time: 1 MB instead of 8 bytes for every coordinate."""


class Permutation:
    """``out[i] = source[index[i]]`` in one gather, 4 bytes a coordinate.

    Args:
        index: shape (length,), int32, a permutation of ``range(length)``.
    """

    __slots__ = ("_index",)

    def __init__(self, index: NDArray[np.int32]) -> None:
        self._index = index

    @property
    def length(self) -> int:
        """Coordinates."""
        return self._index.size

    def apply(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the permuted ``source`` to ``out``, both shape (length,), float32."""
        wide = np.empty(min(_STEP, self.length), dtype=np.intp)
        for start in range(0, self.length, _STEP):
            piece = out[start : start + _STEP]
            # mode="raise" would make numpy buffer the output. Indices are in range, and "wrap" is the cheapest check.
            np.take(source, self._widened(start, wide), out=piece, mode="wrap")

    def invert(self, source: Float32Vector, out: Float32Vector) -> None:
        """Undo `apply`: write every coordinate of ``source`` to its place in ``out``, both shape (length,), float32."""
        wide = np.empty(min(_STEP, self.length), dtype=np.intp)
        for start in range(0, self.length, _STEP):
            out[self._widened(start, wide)] = source[start : start + _STEP]

    def _widened(self, start: int, wide: NDArray[np.intp]) -> NDArray[np.intp]:
        index = self._index[start : start + _STEP]
        wide[: index.size] = index
        return wide[: index.size]

    def __repr__(self) -> str:
        return f"Permutation(length={self.length}, index=<redacted>)"


def _build(subkey: Subkey, length: int) -> Permutation:
    return Permutation(permutation(subkey("permutation"), length))


MODE: Final = Mode("permutation", _build, exact=True)
