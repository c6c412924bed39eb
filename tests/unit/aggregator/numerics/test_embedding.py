"""EDC equals the singular value decomposition, MADC its n^3 definition, and both refuse what has no answer."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest

from aggregator.numerics.backend import Backend, cosine_matrix, gram
from aggregator.numerics.checks import NumericsError
from aggregator.numerics.embedding import (
    PRECISE_FLOPS,
    edc,
    edc_from_gram,
    madc,
    top_directions,
)
from aggregator.numerics.torch_backend import TorchBackend

needs_torch = pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed")


def groups(n: int, d: int, k: int, seed: int = 0) -> np.ndarray:
    """Return n updates of k groups, shape (n, d), float32."""
    rng = np.random.default_rng(seed)
    centres = rng.standard_normal((k, d))
    return (centres[np.arange(n) % k] + rng.standard_normal((n, d))).astype(np.float32)


def madc_by_definition(similarity: np.ndarray) -> np.ndarray:
    """Return fedgroup Eq. 7 as written, pair by pair."""
    n = len(similarity)
    found = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            others = [z for z in range(n) if z not in (i, j)]
            if i != j:
                found[i, j] = sum(abs(similarity[i, z] - similarity[j, z]) for z in others) / (n - 2)
    return found


def test_edc_keeps_the_top_directions() -> None:
    """Beyond ``PRECISE_FLOPS`` products are float32; directions of true groups are then exact to 1e-5."""
    rows = groups(12, 400, 3)
    np.testing.assert_allclose(edc_from_gram(gram(rows), 3), edc(rows, 3), atol=1e-5)
    assert PRECISE_FLOPS > 2.0 * 12 * 12 * 400


def test_zero_update_has_a_row_of_zeros() -> None:
    """A zero update has a row of zeros and a missing direction a column."""
    rows = np.array([[1.0, 1, 0], [0, 0, 0], [2, 2, 0], [-1, -1, 0]], dtype=np.float32)
    np.testing.assert_allclose(np.abs(edc(rows, 3)), [[1, 0, 0], [0, 0, 0], [1, 0, 0], [1, 0, 0]], atol=1e-7)
    np.testing.assert_array_equal(edc(np.zeros((3, 4), np.float32), 2), np.zeros((3, 2)))


def test_edc_by_hand() -> None:
    """Two orthogonal axes, the longer one first."""
    rows = np.array([[3.0, 0, 0], [0, 2.0, 0], [3.0, 0, 0]], dtype=np.float32)
    np.testing.assert_allclose(edc(rows, 2), [[1, 0], [0, 1], [1, 0]], atol=1e-12)


@pytest.mark.parametrize("factor", [1e-12, 1e12])
def test_edc_does_not_depend_on_the_scale(factor: float) -> None:
    rows = groups(9, 100, 3)
    np.testing.assert_allclose(edc(rows * np.float32(factor), 3), edc(rows, 3), atol=1e-6)


def test_directions_are_orthonormal() -> None:
    """Directions are orthogonal and of length one."""
    rows = groups(12, 400, 3)
    wide = rows.astype(np.float64)
    found = top_directions(gram(rows, precise=True), 3)
    vectors = found.coefficients.T @ wide
    np.testing.assert_allclose(vectors @ vectors.T, np.eye(3), atol=1e-10)
    np.testing.assert_allclose(found.singular_values, np.linalg.svd(wide)[1][:3], rtol=1e-10)
    np.testing.assert_allclose(wide @ vectors.T / np.linalg.norm(wide, axis=1)[:, None], edc(rows, 3), atol=1e-10)


@pytest.mark.torch
@needs_torch
def test_backends_give_the_same_rows_to_1e_5() -> None:
    backends: list[Backend] = [TorchBackend("cpu")]
    import torch

    if torch.cuda.is_available():
        backends.append(TorchBackend("cuda"))
    rows = groups(12, 20_000, 3)
    for backend in backends:
        np.testing.assert_allclose(edc(rows, 3, backend=backend), edc(rows, 3), atol=1e-5)


FEW = groups(4, 10, 2)
BAD = np.where(np.arange(4)[:, None] == 2, np.float32(np.inf), FEW)


@pytest.mark.parametrize(
    ("function", "arguments", "message"),
    [
        (edc, (FEW, 0), "directions"),
        (edc, (FEW, 5), "directions"),
        (edc, (FEW[:1], 1), "at least 2"),
        (edc, (BAD, 2), r"\[2\]"),
        (edc_from_gram, (np.full((3, 3), np.nan), 2), "NaN"),
        (edc_from_gram, (np.array([[1.0, 0.5], [0.2, 1.0]]), 1), "symmetric"),
        (madc, (np.eye(2),), "at least 3"),
        (madc, (np.ones((3, 4)),), r"\(n, n\)"),
        (madc, (np.full((3, 3), np.nan),), "NaN"),
    ],
)
def test_what_has_no_answer_is_refused(function: object, arguments: tuple[object, ...], message: str) -> None:
    assert callable(function)
    with pytest.raises(NumericsError, match=message):
        function(*arguments)


@pytest.mark.torch
@needs_torch
@pytest.mark.parametrize("n", [3, 4, 65])
def test_madc_in_torch_equals_numpys(n: int) -> None:
    """To 1e-6: torch sums float32. Rows may be read-only, as a strategy's are."""
    similarity = cosine_matrix(groups(n, 30, 3))
    similarity.setflags(write=False)
    found = madc(similarity, backend=TorchBackend("cpu"))
    assert np.array_equal(found, found.T)
    assert not np.diagonal(found).any()
    np.testing.assert_allclose(found, madc(similarity), atol=1e-6)


def test_madc_of_a_zero_update() -> None:
    """A zero update has cosine 0 with itself, so the terms taken off are not 2 (1 - S)."""
    rows = groups(6, 30, 2)
    rows[3] = 0
    similarity = cosine_matrix(rows)
    np.testing.assert_allclose(madc(similarity), madc_by_definition(similarity), atol=1e-13)
