"""Mode ``permutation``: coordinates change places inside their segment, as the clustering papers propose.

Two layouts of the same permutation. Up to ``BLOCKED_FROM`` coordinates one gather is fastest. Beyond, the source no
longer fits the cache and a gather waits for memory at every element; two gathers that each stay in the cache take
half the time: first inside blocks of the source, then a merge of one ascending stream a block.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from crypto.mask.modes.base import Mode, Subkey
from crypto.mask.stream import permutation
from wire.types import Float32Vector

BLOCKED_FROM: Final = 4_000_000
"""Coordinates from which two gathers inside the cache beat one across memory."""

SOURCE_BLOCK: Final = 32_003
"""Coordinates a block: 128 KB sit in the L2 cache; prime, so that the streams don't share cache sets; below 2**16."""

_STEP: Final = 131_072
"""Indices widened to the machine's pointer size at a time: 1 MB instead of 8 bytes for every coordinate."""


def _gather(source: Float32Vector, index: NDArray[np.int32], out: Float32Vector) -> None:
    wide = np.empty(min(_STEP, out.size), dtype=np.intp)
    for start in range(0, out.size, _STEP):
        stop = min(start + _STEP, out.size)
        piece = wide[: stop - start]
        piece[:] = index[start:stop]
        # "clip" because "raise" would make numpy buffer the output; indices are in range by construction.
        np.take(source, piece, out=out[start:stop], mode="clip")


def _scatter(source: Float32Vector, index: NDArray[np.int32], out: Float32Vector) -> None:
    wide = np.empty(min(_STEP, source.size), dtype=np.intp)
    for start in range(0, source.size, _STEP):
        stop = min(start + _STEP, source.size)
        piece = wide[: stop - start]
        piece[:] = index[start:stop]
        out[piece] = source[start:stop]


class Permutation:
    """``out[i] = source[index[i]]`` in one gather, 4 bytes a coordinate."""

    __slots__ = ("_index",)

    def __init__(self, index: NDArray[np.int64]) -> None:
        """Keep ``index``, shape (length,), int64, a permutation of ``range(length)``."""
        self._index = index.astype(np.int32)

    @property
    def length(self) -> int:
        """Coordinates."""
        return self._index.size

    def apply(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the permuted ``source`` to ``out``, both shape (length,), float32."""
        _gather(source, self._index, out)

    def invert(self, source: Float32Vector, out: Float32Vector) -> None:
        """Put every coordinate of ``source`` back in its place in ``out``, both shape (length,), float32."""
        _scatter(source, self._index, out)

    def __repr__(self) -> str:
        return f"Permutation(length={self.length}, index=<redacted>)"


class BlockedPermutation:
    """``out[i] = source[index[i]]`` in two cache-sized gathers, 6 bytes a coordinate and 4 while it runs."""

    __slots__ = ("_local", "_position")

    def __init__(self, index: NDArray[np.int64]) -> None:
        """Split ``index``, shape (length,), int64, a permutation of ``range(length)``, into the two gathers."""
        block = (index // SOURCE_BLOCK).astype(np.uint16)
        order = np.argsort(block, kind="stable")
        del block
        self._local: NDArray[np.uint16] = (index % SOURCE_BLOCK).astype(np.uint16)[order]
        self._position: NDArray[np.int32] = np.empty(index.size, dtype=np.int32)
        self._position[order] = np.arange(index.size, dtype=np.int32)

    @property
    def length(self) -> int:
        """Coordinates."""
        return self._position.size

    def apply(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the permuted ``source`` to ``out``, both shape (length,), float32."""
        by_block = np.empty(self.length, dtype=np.float32)
        wide = np.empty(SOURCE_BLOCK, dtype=np.intp)
        for start in range(0, self.length, SOURCE_BLOCK):
            stop = min(start + SOURCE_BLOCK, self.length)
            piece = wide[: stop - start]
            piece[:] = self._local[start:stop]
            np.take(source[start:stop], piece, out=by_block[start:stop], mode="clip")
        _gather(by_block, self._position, out)

    def invert(self, source: Float32Vector, out: Float32Vector) -> None:
        """Put every coordinate of ``source`` back in its place in ``out``, both shape (length,), float32."""
        by_block = np.empty(self.length, dtype=np.float32)
        _scatter(source, self._position, by_block)
        for start in range(0, self.length, SOURCE_BLOCK):
            stop = min(start + SOURCE_BLOCK, self.length)
            out[start:stop][self._local[start:stop].astype(np.intp)] = by_block[start:stop]

    def __repr__(self) -> str:
        return f"BlockedPermutation(length={self.length}, index=<redacted>)"


def from_index(index: NDArray[np.int64]) -> Permutation | BlockedPermutation:
    """Return the faster layout of the permutation ``index``, shape (length,), int64, at its length."""
    return BlockedPermutation(index) if index.size >= BLOCKED_FROM else Permutation(index)


def _build(subkey: Subkey, length: int) -> Permutation | BlockedPermutation:
    return from_index(permutation(subkey("permutation"), length))


MODE: Final = Mode("permutation", _build)
