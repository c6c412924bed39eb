"""Mode ``permutation``: permute the coordinates of each segment, as the clustering papers propose.

There are two layouts of the same permutation. Below ``BLOCKED_FROM`` coordinates one gather is fastest. Above, the source
does not fit the cache, and a gather waits for memory at every element. The second layout splits the permutation into three
steps that move data only within the cache or copy runs: sort each block of the source by output block, copy the runs, and
order each block of the output. That takes less than half the time (ADR 12).
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from crypto.mask.modes.base import Mode, Subkey
from crypto.mask.stream import permutation
from shoal.types import Float32Vector

BLOCKED_FROM: Final = 3_000_000
"""Length from which two gathers inside the cache are faster than one across memory."""

BLOCK: Final = 1 << 16
"""Coordinates per block: 256 KB fit in the L2 cache, and an index fits in 16 bits."""

_BLOCK_BITS: Final = BLOCK.bit_length() - 1
_STEP: Final = 131_072
"""Indices that are widened to pointer size at a time: 1 MB instead of 8 bytes for every coordinate."""


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
        wide = np.empty(min(_STEP, self.length), dtype=np.intp)
        for start in range(0, self.length, _STEP):
            stop = min(start + _STEP, self.length)
            _take(source, _widen(self._index[start:stop], wide), out[start:stop])

    def invert(self, source: Float32Vector, out: Float32Vector) -> None:
        """Undo `apply`: write every coordinate of ``source`` to its place in ``out``, both shape (length,), float32."""
        wide = np.empty(min(_STEP, self.length), dtype=np.intp)
        for start in range(0, self.length, _STEP):
            stop = min(start + _STEP, self.length)
            out[_widen(self._index[start:stop], wide)] = source[start:stop]

    def __repr__(self) -> str:
        return f"Permutation(length={self.length}, index=<redacted>)"


class BlockedPermutation:
    """``out[i] = source[index[i]]`` in two cache-sized gathers, 4 bytes a coordinate and 4 more while it runs.

    The first gather regroups the source: in each source block, the coordinates for output block 0 come first, then those
    for output block 1, and so on. The second orders each output block.
    """

    __slots__ = ("_local", "_rank", "_runs")

    def __init__(self, index: NDArray[np.int64]) -> None:
        """Split ``index``, shape (length,), int64, a permutation of ``range(length)``, into gathers and runs."""
        blocks = range(-(-index.size // BLOCK))
        edges = np.arange(len(blocks) + 1) * BLOCK
        places = np.arange(BLOCK)
        sizes = np.empty((len(blocks), len(blocks)), dtype=np.int64)
        by_output = np.empty(index.size, dtype=np.uint16)
        self._rank: NDArray[np.uint16] = np.empty(index.size, dtype=np.uint16)
        for block in blocks:
            span = self._span(block)
            packed = index[span] << _BLOCK_BITS
            packed |= places[: packed.size]
            packed.sort()
            self._rank[span][packed & (BLOCK - 1)] = places[: packed.size]
            packed >>= _BLOCK_BITS
            by_output[span] = packed & (BLOCK - 1)
            sizes[block] = np.diff(np.searchsorted(packed, edges))
        # The run from source block i to output block j starts at starts[j, i] in the regrouped source.
        starts = np.cumsum(sizes, axis=0) - sizes + edges[:-1]
        self._runs: list[list[slice]] = [_slices(*pair, 4) for pair in zip(starts, sizes, strict=True)]
        starts = np.cumsum(sizes, axis=1) - sizes + edges[:-1, None]
        self._local: NDArray[np.uint16] = np.empty(index.size, dtype=np.uint16)
        for block in blocks:
            runs = _slices(starts[:, block], sizes[:, block], 1)
            np.concatenate([by_output[run] for run in runs], out=self._local[self._span(block)])

    @property
    def length(self) -> int:
        """Coordinates."""
        return self._rank.size

    def apply(self, source: Float32Vector, out: Float32Vector) -> None:
        """Write the permuted ``source`` to ``out``, both shape (length,), float32."""
        regrouped = np.empty(self.length, dtype=np.float32)
        wide = np.empty(BLOCK, dtype=np.intp)
        near = np.empty(BLOCK, dtype=np.float32)
        for block in range(len(self._runs)):
            span = self._span(block)
            index = _widen(self._local[span], wide)
            near[: index.size] = source[span]  # read sequentially into the cache before the random access
            _take(near, index, regrouped[span])
        view = regrouped.data.cast("B")
        for block, runs in enumerate(self._runs):
            span = self._span(block)
            arrived = np.frombuffer(b"".join([view[run] for run in runs]), dtype=np.float32)
            _take(arrived, _widen(self._rank[span], wide), out[span])

    def invert(self, source: Float32Vector, out: Float32Vector) -> None:
        """Undo `apply`: write every coordinate of ``source`` to its place in ``out``, both shape (length,), float32."""
        regrouped = np.empty(self.length, dtype=np.float32)
        wide = np.empty(BLOCK, dtype=np.intp)
        near = np.empty(BLOCK, dtype=np.float32)
        view, arrived = regrouped.data.cast("B"), near.data.cast("B")
        for block, runs in enumerate(self._runs):
            span = self._span(block)
            near[_widen(self._rank[span], wide)] = source[span]
            at = 0
            for run in runs:
                end = at + run.stop - run.start
                view[run] = arrived[at:end]
                at = end
        for block in range(len(self._runs)):
            span = self._span(block)
            index = _widen(self._local[span], wide)
            near[index] = regrouped[span]
            out[span] = near[: index.size]

    def _span(self, block: int) -> slice:
        return slice(block * BLOCK, min((block + 1) * BLOCK, self._rank.size))

    def __repr__(self) -> str:
        return f"BlockedPermutation(length={self.length}, index=<redacted>)"


def _slices(starts: NDArray[np.int64], sizes: NDArray[np.int64], item_bytes: int) -> list[slice]:
    pairs = zip((starts * item_bytes).tolist(), (sizes * item_bytes).tolist(), strict=True)
    return [slice(start, start + size) for start, size in pairs]


def _widen(index: NDArray[np.int32] | NDArray[np.uint16], wide: NDArray[np.intp]) -> NDArray[np.intp]:
    piece = wide[: index.size]
    piece[:] = index
    return piece


def _take(source: Float32Vector, index: NDArray[np.intp], out: Float32Vector) -> None:
    # mode="raise" would make numpy buffer the output. Indices are in range by construction, and "wrap" is the cheapest check.
    np.take(source, index, out=out, mode="wrap")


def from_index(index: NDArray[np.int64]) -> Permutation | BlockedPermutation:
    """Return the faster layout for the permutation ``index``, shape (length,), int64."""
    return BlockedPermutation(index) if index.size >= BLOCKED_FROM else Permutation(index)


def _build(subkey: Subkey, length: int) -> Permutation | BlockedPermutation:
    return from_index(permutation(subkey("permutation"), length))


MODE: Final = Mode("permutation", _build, exact=True)
