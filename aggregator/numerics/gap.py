"""The noise up to which a bipartition is right, by the separation theorem (cfl Thm 1).

gamma is a device's approximation noise: the distance of its gradient from its distribution's true gradient, in units
of the true gradient's length (cfl Eq. 16). The theorem needs gamma < 1.
"""

from __future__ import annotations

import math

from aggregator.numerics.checks import NumericsError


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


def _check_gamma(gamma: float) -> None:
    if not 0.0 <= gamma < 1.0:
        raise NumericsError(f"gamma is {gamma}, not in [0, 1)")


def _check_cosine(value: float) -> None:
    if not -1.0 <= value <= 1.0:
        raise NumericsError(f"{value} is not a cosine")
