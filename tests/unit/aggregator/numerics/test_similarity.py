"""Dot products and cosines against float64 arithmetic."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aggregator.numerics.backend import cosine_from_gram, cosine_matrix, gram
from aggregator.numerics.checks import NumericsError
from aggregator.numerics.rows import CHUNK_COLUMNS

WIDE = np.random.default_rng(5).standard_normal((7, 2 * CHUNK_COLUMNS + 333), dtype=np.float32)


def exact_cosine(updates: np.ndarray) -> np.ndarray:
    wide = updates.astype(np.float64)
    norms = np.linalg.norm(wide, axis=1)
    return wide @ wide.T / norms[:, None] / norms[None, :]


def test_any_kind_of_rows_gives_the_same(tmp_path: Path) -> None:
    """The layout of the rows in memory does not matter."""
    expected = cosine_matrix(WIDE)
    path = tmp_path / "rows.f32"
    WIDE.tofile(path)
    mapped = np.memmap(path, dtype=np.float32, mode="r", shape=WIDE.shape)
    unaligned = np.frombuffer(b"x" + WIDE.tobytes(), dtype=np.float32, offset=1).reshape(WIDE.shape)
    strided = np.repeat(WIDE, 2, axis=1)[:, ::2]
    for updates in (list(WIDE), list(mapped), mapped, np.asfortranarray(WIDE), strided, unaligned):
        np.testing.assert_allclose(cosine_matrix(updates), expected, atol=1e-7)


def test_zero_update_has_cosine_zero() -> None:
    """A zero update has cosine zero with all and itself."""
    updates = WIDE.copy()
    updates[2] = 0.0
    cosines = cosine_matrix(updates)
    np.testing.assert_array_equal(cosines[2], 0.0)
    np.testing.assert_array_equal(cosines[:, 2], 0.0)
    np.testing.assert_array_equal(np.diagonal(cosines), [1, 1, 0, 1, 1, 1, 1])


@pytest.mark.parametrize("scale", [1e-44, 1e-38, 1e-30, 1e-20, 1e15, 1e20, 1e37])
def test_overflowing_squares_keep_the_cosine(scale: float) -> None:
    """Cosines don't depend on a row's length, even if its square vanishes or overflows."""
    updates = WIDE[:, :400].copy()
    updates[3] = np.where(np.arange(400) % 3 == 0, np.float32(scale), np.float32(0))
    updates[4] = -updates[3]
    reference = updates.astype(np.float64)
    reference[3:5] /= np.abs(reference[3:5]).max(axis=1, keepdims=True)
    np.testing.assert_allclose(cosine_matrix(updates), exact_cosine(reference), atol=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("function", [gram, cosine_matrix])
def test_infinite_updates_are_refused_by_row(bad: float, function: object) -> None:
    """Not finite updates are refused by row."""
    updates = WIDE.copy()
    updates[4, 20_000] = bad
    assert callable(function)
    with pytest.raises(NumericsError, match=r"\[4\]"):
        function(updates)


@pytest.mark.parametrize(
    "updates",
    [
        WIDE[:1],
        [WIDE[0]],
        [],
        WIDE[:, :0],
        WIDE[0],
        WIDE.astype(np.float64),
        [WIDE[0], WIDE[1, :-1]],
        [WIDE[0], WIDE[1].astype(np.float64)],
        [WIDE[:2], WIDE[:2]],
    ],
    ids=["one row", "list of one", "empty", "no columns", "vector", "float64", "ragged", "mixed", "3-d"],
)
def test_other_shapes_and_dtypes_are_refused(updates: np.ndarray) -> None:
    with pytest.raises(NumericsError):
        cosine_matrix(updates)


@pytest.mark.parametrize(
    "products",
    [np.zeros((2, 3)), np.zeros(4), np.array([[1.0, np.nan], [np.nan, 1.0]]), np.array([[-1.0, 0.0], [0.0, 1.0]])],
)
def test_other_matrix_is_refused(products: np.ndarray) -> None:
    """A matrix that is no gram matrix is refused."""
    with pytest.raises(NumericsError):
        cosine_from_gram(products)


def test_cosine_leaves_its_argument_alone() -> None:
    """Cosine from gram leaves its argument alone."""
    products = gram(WIDE)
    before = products.copy()
    cosine_from_gram(products)
    np.testing.assert_array_equal(products, before)
