"""Checks of small square matrices, and imports of optional packages."""

from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from aggregator.numerics.checks import SYMMETRY_TOLERANCE, NumericsError, check_square, scipy_module, sklearn_module
from shoal.errors import ConfigError

COSINES = np.array([[1.0, 0.25, -0.5], [0.25, 1.0, 0.0], [-0.5, 0.0, 1.0]])


def test_symmetric_matrix_is_unchanged() -> None:
    """A symmetric matrix is returned as float64 without a change."""
    narrow = COSINES.astype(np.float32)
    found = check_square(narrow, "the cosines", least=3)
    assert found.dtype == np.float64
    np.testing.assert_array_equal(found, COSINES)
    assert narrow.dtype == np.float32


@pytest.mark.parametrize(
    ("matrix", "message"),
    [
        (np.zeros((3, 2)), "the cosines has shape (3, 2), not (n, n)"),
        (np.zeros(9), "the cosines has shape (9,), not (n, n)"),
        (np.zeros((3, 3, 3)), "the cosines has shape (3, 3, 3), not (n, n)"),
        (COSINES[:2, :2], "the cosines covers 2 updates, but at least 3 are needed"),
        (np.full((3, 3), math.nan), "the cosines holds NaN or infinities"),
        (np.diag([1.0, math.inf, 1.0]), "the cosines holds NaN or infinities"),
        (np.triu(COSINES), "the cosines is not symmetric"),
    ],
)
def test_any_other_matrix_is_refused_by_name(matrix: np.ndarray, message: str) -> None:
    with pytest.raises(NumericsError) as caught:
        check_square(matrix, "the cosines", least=3)
    assert str(caught.value) == message


@pytest.mark.parametrize("scale", [1.0, 1e6])
def test_tolerance_grows_with_the_largest(scale: float) -> None:
    """Symmetry is checked to a tolerance that grows with the largest entry."""

    def skewed(difference: float) -> np.ndarray:
        matrix = np.eye(3) * scale
        matrix[0, 1] += difference
        return matrix

    limit = SYMMETRY_TOLERANCE * scale
    check_square(skewed(0.9 * limit), "m", least=1)
    with pytest.raises(NumericsError, match="not symmetric"):
        check_square(skewed(1.1 * limit), "m", least=1)


def test_small_entries_keep_the_tolerance() -> None:
    """Entries below one do not make the tolerance smaller."""
    tiny = 1e-12 * np.array([[1.0, 1.0], [0.0, 1.0]])
    np.testing.assert_array_equal(check_square(tiny, "m", least=1), tiny)


@pytest.mark.parametrize(
    ("load", "name", "package"),
    [(scipy_module, "scipy.spatial", "scipy"), (sklearn_module, "sklearn.cluster", "scikit-learn")],
)
def test_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, load: object, name: str, package: str) -> None:
    """A missing package is named as it is installed."""
    monkeypatch.setitem(sys.modules, name, None)
    assert callable(load)
    with pytest.raises(ConfigError, match=f"^{package} is not installed$") as caught:
        load(name)
    assert "pip install 'shoal[aggregator]'" in caught.value.hint
    assert caught.value.__cause__ is None


def test_present_module_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module that is there is returned itself."""
    monkeypatch.setitem(sys.modules, "scipy.spatial", math)
    assert scipy_module("scipy.spatial") is math
