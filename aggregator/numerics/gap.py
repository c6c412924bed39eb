"""Correctness conditions of a bipartition: separation gap (cfl Def. 2) and bounds of the separation theorem (cfl Thm 1).

gamma is a device's approximation noise: the distance of its gradient from its distribution's true gradient, in units
of the true gradient's length (cfl Eq. 16). The theorem needs gamma < 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.bipartition import bipartition
from aggregator.numerics.errors import NumericsError


@dataclass(frozen=True, slots=True)
class SeparationGap:
    """The similarities within and across true groups.

    Attributes:
        intra_min: least similarity of two devices of one group; 1 if every group has one device.
        cross_max: largest similarity across the best bipartition.
    """

    intra_min: float
    cross_max: float

    @property
    def gap(self) -> float:
        """g(alpha) of cfl Eq. 28: if it is above zero, the best bipartition cuts no group."""
        return self.intra_min - self.cross_max


def separation_gap(similarity: NDArray[np.float64], groups: Sequence[int]) -> SeparationGap:
    """Return the separation gap of known groups (cfl Def. 2, Eq. 28).

    Args:
        similarity: shape (m, m), float64, symmetric, finite, m at least 2.
        groups: the true group of each of the m devices.

    Raises:
        NumericsError: ``similarity`` is not as above, or ``groups`` has another length.
    """
    cross_max = bipartition(similarity).cross_max
    labels = np.asarray(groups)
    if labels.shape != (len(similarity),):
        raise NumericsError(f"{labels.size} groups for {len(similarity)} devices")
    together = labels[:, None] == labels[None, :]
    np.fill_diagonal(together, False)
    intra_min = float(similarity.min(where=together, initial=1.0))
    return SeparationGap(intra_min, cross_max)


def gamma_limit(cross_max: float) -> float:
    """Return sqrt((1 - alpha_cross_max) / 2): a split is correct if every gamma is smaller (cfl Eq. 39)."""
    _check_cosine(cross_max)
    return math.sqrt((1.0 - cross_max) / 2.0)


def is_safe_split(cross_max: float, gamma_max: float) -> bool:
    """Return whether a split with ``cross_max`` is correct for all noise up to ``gamma_max`` (cfl Eq. 39)."""
    return gamma_max < gamma_limit(cross_max)


def overlap(gamma_i: float, gamma_j: float) -> float:
    """Return H_ij of cfl Eq. 20: the cosine of the sum of the two noises' largest angles."""
    _check_gamma(gamma_i)
    _check_gamma(gamma_j)
    return -gamma_i * gamma_j + math.sqrt(1.0 - gamma_i**2) * math.sqrt(1.0 - gamma_j**2)


def cross_max_bound(distributions: int, overlap_ij: float) -> float:
    """Return the upper bound of cfl Eq. 19 on the similarity across the best bipartition.

    Args:
        distributions: k, at least 2.
        overlap_ij: H of the noisiest pair of devices that the bipartition separates.
    """
    if distributions < 2:
        raise NumericsError(f"a bound across {distributions} distributions; at least 2 are needed")
    _check_cosine(overlap_ij)
    angle = math.pi / (distributions - 1)
    if overlap_ij < math.cos(angle):
        return 1.0
    return math.cos(angle) * overlap_ij + math.sin(angle) * math.sqrt(1.0 - overlap_ij**2)


def theorem_bounds(gammas: Sequence[float], groups: Sequence[int]) -> SeparationGap:
    """Return the worst case of cfl Theorem 1: ``intra_min`` is a lower, ``cross_max`` an upper bound.

    H falls as either gamma grows, so the two noisiest devices of a group, or of two groups, give the bounds.

    Args:
        gammas: the noise of each device, in [0, 1).
        groups: the true group of each device; at least two groups.

    Raises:
        NumericsError: lengths differ, fewer than two groups, or a gamma out of range.
    """
    if len(gammas) != len(groups):
        raise NumericsError(f"{len(gammas)} gammas for {len(groups)} devices")
    members: dict[int, list[float]] = {}
    for gamma, group in zip(gammas, groups, strict=True):
        _check_gamma(gamma)
        members.setdefault(group, []).append(gamma)
    if len(members) < 2:
        raise NumericsError("the theorem's bounds need at least two groups")
    ranked = [sorted(noises, reverse=True) for noises in members.values()]
    intra_min = min((overlap(noises[0], noises[1]) for noises in ranked if len(noises) > 1), default=1.0)
    first, second = sorted((noises[0] for noises in ranked), reverse=True)[:2]
    return SeparationGap(intra_min, cross_max_bound(len(members), overlap(first, second)))


def _check_gamma(gamma: float) -> None:
    if not 0.0 <= gamma < 1.0:
        raise NumericsError(f"gamma is {gamma}, not in [0, 1)")


def _check_cosine(value: float) -> None:
    if not -1.0 <= value <= 1.0:
        raise NumericsError(f"{value} is not a cosine")
