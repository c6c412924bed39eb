"""Squared distances of updates to centres, on every backend."""

from __future__ import annotations

import numpy as np
import pytest

from aggregator.numerics.distances import squared_distances
from aggregator.numerics.errors import NumericsError
from aggregator.numerics.rows import CHUNK_COLUMNS
from tests.helpers.backends import BACKENDS, make

ROWS = np.random.default_rng(5).standard_normal((23, CHUNK_COLUMNS + 99), dtype=np.float32)


@pytest.mark.parametrize("name", BACKENDS)
def test_squared_distances_equal_float64(name: str) -> None:
    """Squared distances equal float64 arithmetic."""
    centres = ROWS[:3] * np.float32(0.5)
    expected = ((ROWS[:, None].astype(np.float64) - centres[None]) ** 2).sum(axis=2)
    found = squared_distances(ROWS, centres, backend=make(name))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    np.testing.assert_array_equal(squared_distances(list(ROWS), list(centres), backend=make(name)), found)


def test_long_close_vectors_do_not_cancel() -> None:
    """Whole models: length 1000, distances about 0.01; |a|^2 - 2 a.c + |c|^2 would be rounding alone."""
    rng = np.random.default_rng(8)
    model = 100 * rng.standard_normal(500)
    centres = (model + 1e-3 * rng.standard_normal((3, 500))).astype(np.float32)
    rows = (centres[[0, 1, 2, 2, 0]] + 3e-4 * rng.standard_normal((5, 500))).astype(np.float32)
    expected = ((rows[:, None].astype(np.float64) - centres[None]) ** 2).sum(axis=2)
    np.testing.assert_allclose(squared_distances(rows, centres), expected, rtol=1e-2)
    np.testing.assert_array_equal(squared_distances(rows, centres).argmin(axis=1), [0, 1, 2, 2, 0])


def test_distances_refuse_what_has_no_answer() -> None:
    bad = ROWS[:3].copy()
    bad[1, 0] = np.inf
    with pytest.raises(NumericsError, match=r"updates \[1\]"):
        squared_distances(bad, ROWS[:2])
    with pytest.raises(NumericsError, match=r"centres \[1\]"):
        squared_distances(ROWS[:2], bad)
    with pytest.raises(NumericsError, match="coordinates"):
        squared_distances(ROWS[:2], ROWS[:2, :5])


def test_overflowing_distances_blame_no_row() -> None:
    """Distances that leave float32 are refused and no row is blamed."""
    far = np.full((1, 4), 3e38, np.float32)
    with pytest.raises(NumericsError, match=r"^distances are not finite; .*updates \[\], centres \[\]$"):
        squared_distances(far, np.concatenate([-far, -far]))


def test_equal_vectors_are_not_negative() -> None:
    """Rounding would leave a few of them below zero."""
    found = squared_distances(ROWS[:5, :300], ROWS[:5, :300])
    assert found.min() == 0.0
    np.testing.assert_allclose(np.diagonal(found), 0.0, atol=1e-3)
