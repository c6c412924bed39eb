"""Cut a set of devices in two by the similarity of their updates (cfl Eq. 35, Alg. 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.checks import NumericsError
from shoal.errors import ConfigError

SYMMETRY_TOLERANCE: Final = 1e-9
_TILE: Final = 128

LINKAGES: Final = ("single", "complete", "average")

_Labels = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class Bipartition:
    """Two halves of the positions 0 to m - 1.

    Attributes:
        left: ascending positions, 0 among them.
        right: the other positions, ascending, at least one.
        cross_max: largest similarity across the halves; under single linkage the least that any bipartition reaches.
    """

    left: tuple[int, ...]
    right: tuple[int, ...]
    cross_max: float


def bipartition(similarity: NDArray[np.float64], linkage: str = "single") -> Bipartition:
    """Divide the devices with the given similarities into two halves, of any size: see `balanced_bipartition`."""
    found = balanced_bipartition(similarity, linkage, 1)
    assert found is not None  # one device on either side is always possible
    return found


def balanced_bipartition(similarity: NDArray[np.float64], linkage: str, least: int) -> Bipartition | None:
    """Divide the devices with the given similarities into two halves; None if a half would have fewer than ``least``.

    ``single`` with ``least=1`` is optimal in the sense of cfl Eq. 35 and takes O(m^2): cfl Alg. 1 merges the most similar pair
    until two sets remain, which is single linkage cut at two sets, or the maximum spanning tree (Prim) without its weakest
    edge. With a larger ``least`` it is the weakest edge that leaves so many devices on either side, so that one odd device does
    not hide the groups. ``complete``, as in public implementations of CFL, keeps the least similarity within a half high,
    ``average`` the mean; their ``cross_max`` may be larger. Halves hold positions in the matrix; the caller maps them to
    device ids.

    Args:
        similarity: shape (m, m), float64, symmetric to 1e-9, finite, m at least 2; the diagonal is not used.
        linkage: ``single``, ``complete`` or ``average``.
        least: fewest devices of a half, at least 1.

    Raises:
        NumericsError: ``similarity`` is not as above.
        ConfigError: an unknown linkage.
    """
    matrix = np.asarray(similarity, dtype=np.float64)
    _check(matrix)
    if linkage not in LINKAGES:
        raise ConfigError(f"linkage {linkage!r} is not known", hint=f"use one of {', '.join(LINKAGES)}")
    if len(matrix) < 2 * least:
        return None
    in_right = _single(matrix, least) if linkage == "single" else _merged(matrix, average=linkage == "average")
    if in_right is None or min(in_right.sum(), (~in_right).sum()) < least:
        return None
    cross_max = float(matrix[~in_right][:, in_right].max())
    if in_right[0]:
        in_right = ~in_right
    left, right = np.flatnonzero(~in_right), np.flatnonzero(in_right)
    return Bipartition(tuple(left.tolist()), tuple(right.tolist()), cross_max)


def _check(matrix: NDArray[np.float64]) -> None:
    if matrix.ndim != 2 or matrix.shape[0] != matrix.shape[1]:
        raise NumericsError(f"similarity has shape {matrix.shape}, not (m, m)")
    size = len(matrix)
    if size < 2:
        raise NumericsError("a bipartition needs at least two devices")
    # Tiles of both triangles fit the cache, a whole transposed comparison does not. A NaN or an infinity makes the
    # difference NaN or infinite, so this one test refuses them too.
    with np.errstate(invalid="ignore"):
        for top in range(0, size, _TILE):
            for start in range(top, size, _TILE):
                upper = matrix[top : top + _TILE, start : start + _TILE]
                lower = matrix[start : start + _TILE, top : top + _TILE]
                if not np.abs(upper - lower.T).max() <= SYMMETRY_TOLERANCE:
                    raise NumericsError("similarity is not symmetric, or holds NaN or infinities")


def _single(matrix: NDArray[np.float64], least: int) -> _Labels | None:
    """Grow the maximum spanning tree from device 0 (Prim, dense) and cut its weakest edge between ``least`` devices each."""
    size = len(matrix)
    outside = np.ones(size, dtype=bool)
    outside[0] = False
    best = matrix[0].copy()
    best[0] = -np.inf
    parent = np.zeros(size, dtype=np.intp)
    order = np.empty(size - 1, dtype=np.intp)
    weight = np.empty(size - 1)
    closer = np.empty(size, dtype=bool)
    for step in range(size - 1):
        nearest = int(best.argmax())
        order[step] = nearest
        weight[step] = best[nearest]
        outside[nearest] = False
        row = matrix[nearest]
        np.greater(row, best, out=closer)
        closer &= outside
        np.copyto(best, row, where=closer)
        parent[closer] = nearest
        best[nearest] = -np.inf
    below = np.ones(size, dtype=np.intp)
    for device in order[::-1]:
        below[parent[device]] += below[device]
    allowed = (below[order] >= least) & (size - below[order] >= least)
    if not allowed.any():
        return None
    cut = int(np.where(allowed, weight, np.inf).argmin())
    in_right = np.zeros(size, dtype=bool)
    for step, device in enumerate(order):
        in_right[device] = True if step == cut else in_right[parent[device]]
    return in_right


def _merged(matrix: NDArray[np.float64], *, average: bool) -> _Labels:
    """Merge by complete or average linkage until two sets remain: nearest-neighbour chain (Murtagh 1983), O(m^2) time.

    The chain merges in another order than the greedy method but builds the same tree, and its last merge, which is
    left out, is the tree's root.
    """
    size = len(matrix)
    work = matrix.copy()
    np.fill_diagonal(work, -np.inf)
    member_of = np.arange(size)
    alive = np.ones(size, dtype=bool)
    counts = np.ones(size)
    chain: list[int] = []
    for _ in range(size - 2):
        if not chain:
            chain.append(int(alive.argmax()))
        while True:
            tip = chain[-1]
            nearest = int(work[tip].argmax())
            # On a tie the predecessor counts: the chain could otherwise run in a circle of equal pairs.
            if len(chain) > 1 and work[tip, chain[-2]] >= work[tip, nearest]:
                break
            chain.append(nearest)
        kept, gone = sorted((chain.pop(), chain.pop()))
        if average:
            merged = (counts[kept] * work[kept] + counts[gone] * work[gone]) / (counts[kept] + counts[gone])
        else:
            merged = np.minimum(work[kept], work[gone])
        counts[kept] += counts[gone]
        work[kept] = merged
        work[:, kept] = merged
        work[gone] = -np.inf
        work[:, gone] = -np.inf
        alive[gone] = False
        member_of[member_of == gone] = kept
    in_right: _Labels = member_of != member_of[0]
    return in_right
