"""CFL's candidate splits: the tests of Alg. 5 (lines 13 to 18), the best bipartition and its measures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.backend import Backend, cosine_matrix
from aggregator.numerics.bipartition import LINKAGES, Bipartition, balanced_bipartition, bipartition
from aggregator.numerics.gap import gamma_limit, is_safe_split, overlap
from aggregator.strategies.base import ClientUpdate, Groups
from aggregator.strategies.cfl.state import CflSettings, Cut
from shoal.protocol.cells import Partition


@dataclass(frozen=True, slots=True)
class Norms:
    """A cluster's mean update and its largest single update in one round, as l2 norms."""

    mean: float
    largest: float


def settled(settings: CflSettings, norms: Norms, early_norm: float) -> bool:
    """Whether the mean has (nearly) vanished while single updates have not (cfl Eqs 32 and 33).

    Args:
        settings: gives eps1 and eps2, and whether they are norms or shares.
        norms: the cluster's in this round.
        early_norm: largest update norm of the first rounds.
    """
    if settings.form == "relative":
        return norms.mean < settings.eps1 * norms.largest and norms.largest > settings.eps2 * early_norm
    return norms.mean < settings.eps1 and norms.largest > settings.eps2


def find_cuts(
    settings: CflSettings, rows: Sequence[ClientUpdate], least_side: int, norms: Norms, backend: Backend | None
) -> tuple[Cut, ...]:
    """Return the candidate splits, each once, the preferred one first; none if the limits forbid all.

    The first is by the configured linkage: ``single`` is the optimal bipartition of the updates' cosines (cfl Alg. 1). Where
    splits are validated, the weakest link that leaves ``least_side`` devices on either side takes its place if a half would be
    smaller, and the cuts by the other linkages follow: a trial may refuse the first.

    Args:
        settings: gives the linkage and gamma_max, and whether splits are validated.
        rows: the members' newest updates, each with a vector (d,).
        least_side: fewest devices of a half.
        norms: the cluster's in this round, for the report.
        backend: computes the cosines.
    """
    if len(rows) < 2 * least_side:
        return ()
    similarity = cosine_matrix([c.row for c in rows], backend=backend)
    lengths = np.array([c.norm for c in rows])
    return tuple(_cut(rows, similarity, lengths, cut, norms) for cut in candidates(settings, similarity, least_side))


def candidates(settings: CflSettings, similarity: NDArray[np.float64], least_side: int) -> tuple[Bipartition, ...]:
    """Return the bipartitions of `find_cuts` for a matrix of cosines, (m, m) float64."""
    if len(similarity) < 2 * least_side:
        return ()
    found: dict[tuple[int, ...], Bipartition] = {}
    if settings.validate:
        for linkage in dict.fromkeys((settings.linkage, *LINKAGES)):
            cut = balanced_bipartition(similarity, linkage, least_side)
            if cut is not None:
                found.setdefault(cut.right, cut)
    else:
        cut = bipartition(similarity, settings.linkage)
        if min(len(cut.left), len(cut.right)) >= least_side:
            found[cut.right] = cut
    return tuple(cut for cut in found.values() if is_safe_split(cut.cross_max, settings.gamma_max))


def partition_of(similarity: NDArray[np.float64], found: Bipartition) -> Partition:
    """Return a bipartition as the keeper tells it: labels 0 and 1, and whether there is a gap, but no cosine."""
    lengths = np.ones(len(similarity))
    figures = describe(similarity, lengths, (found.left, found.right), found.cross_max, Norms(0.0, 1.0))
    labels = bytearray(len(similarity))
    for place in found.right:
        labels[place] = 1
    return Partition(bytes(labels), has_gap(figures))


def looked_cuts(looked: Groups) -> tuple[Cut, ...]:
    """Return the candidate splits that a look has found."""
    found = []
    for at, partition in enumerate(looked.partitions):
        labels = looked.labels(at)
        left, right = (tuple(d for d in looked.devices if labels[d] == side) for side in (0, 1))
        found.append(Cut((left, right), {"gap": partition.gap}))
    return tuple(found)


def statistics_cut(rows: Sequence[ClientUpdate], least_side: int, backend: Backend | None) -> Cut | None:
    """Return the split that statistics of features show; None unless one side is a group of its own.

    That is, each cosine within it is above each across, of the differences from the mean of all. Of three groups the other two
    are one side, so no more is asked of that.

    Args:
        rows: statistics of a cluster's devices, masked, each with a vector (d,).
        least_side: fewest devices of a side.
        backend: computes the products.
    """
    if len(rows) < 2 * least_side:
        return None
    lengths = np.array([c.norm for c in rows])
    products = cosine_matrix([c.row for c in rows], backend=backend) * np.outer(lengths, lengths)
    centred = products - products.mean(0) - products.mean(0)[:, None] + products.mean()
    lengths = np.sqrt(np.maximum(np.diagonal(centred), np.finfo(np.float32).tiny))
    similarity = centred / np.outer(lengths, lengths)
    for linkage in LINKAGES:
        found = balanced_bipartition(similarity, linkage, least_side)
        if found is not None:
            cut = _cut(rows, similarity, lengths, found, Norms(0.0, float(lengths.max())))
            if own_groups(cut.figures):
                return cut
    return None


def _cut(
    rows: Sequence[ClientUpdate],
    similarity: NDArray[np.float64],
    lengths: NDArray[np.float64],
    found: Bipartition,
    norms: Norms,
) -> Cut:
    left, right = (tuple(rows[i].device for i in side) for side in (found.left, found.right))
    return Cut((left, right), describe(similarity, lengths, (found.left, found.right), found.cross_max, norms))


def describe(
    similarity: NDArray[np.float64],
    lengths: NDArray[np.float64],
    sides: tuple[tuple[int, ...], tuple[int, ...]],
    cross_max: float,
    norms: Norms,
) -> dict[str, Any]:
    """Return the measures of a cut.

    Args:
        similarity: shape (m, m), cosines.
        lengths: shape (m,), the updates' l2 norms.
        sides: positions of either half.
        cross_max: largest cosine across.
        norms: the cluster's.

    Returns:
        cross_max; gamma_limit, the noise up to which the cut is right (cfl Eq. 39); mean_norm and max_norm; for either
        side intra_min, its least cosine, and intra_min_estimate, the bound on that if the side is one group
        (cfl Eq. 37). None if a side has one device, or is noisier than the bound allows.
    """
    inside = [np.ix_(side, side) for side in sides]
    pairs = [similarity[i][np.triu_indices(len(side), 1)] for i, side in zip(inside, sides, strict=True)]
    gammas = [noise(similarity[i], lengths[list(side)]) for i, side in zip(inside, sides, strict=True)]
    return {
        "cross_max": cross_max,
        "gamma_limit": gamma_limit(cross_max),
        "mean_norm": norms.mean,
        "max_norm": norms.largest,
        "intra_min": [float(p.min()) if len(p) else None for p in pairs],
        "intra_min_estimate": [_estimate(g) for g in gammas],
    }


def has_gap(figures: Mapping[str, Any]) -> bool:
    """Whether a cut has a separation gap: each cosine within a side is above each across (cfl Def. 2).

    Args:
        figures: measures of the cut, see `describe`; of one that a look has found, whether there is a gap.
    """
    if "gap" in figures:
        return bool(figures["gap"])
    within = [least for least in figures["intra_min"] if least is not None]
    return bool(within) and min(within) > figures["cross_max"]


def own_groups(figures: Mapping[str, Any]) -> list[int]:
    """Return the sides of a cut, 0 and 1, of which each cosine within is above each across; none where a look has found it.

    Of three groups the other two are one side, which has no such gap however clear the cut is.
    """
    within = figures.get("intra_min", ())
    return [side for side, least in enumerate(within) if least is not None and least > figures["cross_max"]]


def noise(similarity: NDArray[np.float64], lengths: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return each update's noise gamma, shape (n,), if all are of one distribution whose true update is their mean.

    The distance from the mean in units of the mean's length (cfl Eq. 16), from cosines and norms alone; infinite if
    the mean vanishes.

    Args:
        similarity: shape (n, n), cosines.
        lengths: shape (n,), l2 norms.
    """
    products = similarity * lengths[:, None] * lengths[None, :]
    mean_squared = float(products.mean())
    if mean_squared <= 0.0:
        return np.full(len(lengths), math.inf)
    squared = np.diagonal(products) - 2.0 * products.mean(axis=1) + mean_squared
    gammas: NDArray[np.float64] = np.sqrt(np.maximum(squared, 0.0) / mean_squared)
    return gammas


def _estimate(gammas: NDArray[np.float64]) -> float | None:
    """H of the two noisiest devices, the least of all pairs' (cfl Eq. 37)."""
    if len(gammas) < 2:
        return None
    second, first = np.sort(gammas)[-2:]
    return overlap(float(first), float(second)) if first < 1.0 else None
