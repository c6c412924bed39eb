"""The noise that a split allows (cfl Thm 1, Eqs 20, 21 and 37 to 39)."""

from __future__ import annotations

import math

import pytest

from aggregator.numerics.checks import NumericsError
from aggregator.numerics.gap import gamma_limit, is_safe_split, overlap


@pytest.mark.parametrize(("cross", "limit"), [(1.0, 0.0), (-1.0, 1.0), (0.5, 0.5), (0.0, math.sqrt(0.5))])
def test_gamma_limit_by_hand(cross: float, limit: float) -> None:
    assert gamma_limit(cross) == pytest.approx(limit)
    assert not is_safe_split(cross, gamma_limit(cross))
    assert limit == 0 or is_safe_split(cross, limit - 1e-9)


def test_overlap_is_cosine_of_added_angles() -> None:
    """Eq. 64: cos(asin x + asin y)."""
    assert overlap(0.3, 0.6) == pytest.approx(math.cos(math.asin(0.3) + math.asin(0.6)))
    assert overlap(0.0, 0.0) == 1.0


@pytest.mark.parametrize("gamma", [0.0, 0.2, 0.7, 0.99])
def test_limit_and_overlap_are_one_test(gamma: float) -> None:
    """Eq. 39 holds exactly where the overlap of the two noisiest devices exceeds the cross similarity."""
    estimate = overlap(gamma, gamma)
    assert estimate == pytest.approx(1.0 - 2.0 * gamma**2)  # Eqs 37 and 38
    for cross in (-0.95, -0.3, 0.2, 0.9):
        assert is_safe_split(cross, gamma) == (estimate > cross)


def test_out_of_range_is_refused() -> None:
    for gamma in (-0.1, 1.0, math.nan):
        with pytest.raises(NumericsError, match="gamma"):
            overlap(gamma, 0.5)
    with pytest.raises(NumericsError, match="not a cosine"):
        gamma_limit(1.5)
