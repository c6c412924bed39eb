"""The attacks on statistics of features, on vectors that are easy to check, and their score."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.features import blocks, errors, plausible, relations

RNG = np.random.default_rng(11)
TRUTH = np.random.default_rng(5).uniform(-1, 1, (10, 5)).astype(np.float32)


def test_uneven_blocks_give_the_columns():
    """Each column fills orthonormal rows whose energy differs between the blocks."""
    weights = np.repeat(RNG.uniform(0.5, 1.5, (4, 12)), 4096, 1).reshape(4, 12, 4096).transpose(0, 2, 1).reshape(4, -1)
    rows = np.linalg.qr((weights * RNG.standard_normal(weights.shape)).T)[0].T
    clear = RNG.standard_normal((9, 4))
    found = blocks(clear @ rows, 4)
    cosines = np.abs((found / np.linalg.norm(found, axis=0)).T @ (clear / np.linalg.norm(clear, axis=0)))
    assert (cosines.max(0) > 0.99).all()


def test_relations_hold_for_integers_alone():
    figures, whole = RNG.uniform(-1, 1, (12, 5)), RNG.integers(-30, 31, (5, 20))
    assert relations(figures @ whole, 4, 5) == 1
    assert relations(figures @ (whole + RNG.uniform(-0.5, 0.5, whole.shape)), 4, 5) == 0


@pytest.mark.torch
def test_most_plausible_figures_are_true():
    """The most plausible figures are the true ones."""
    means = RNG.uniform(-0.6, 0.6, 15)
    clear = np.stack([means, means**2 + 0.02, np.ones(15)], 1)
    found = plausible(clear @ np.linalg.qr(RNG.standard_normal((40, 3)))[0].T, 1, 150)
    np.testing.assert_allclose(np.abs(found), np.abs(clear[:, :2]), atol=0.03)


def test_errors_are_in_spread_of_a_figure():
    """In any order and with any sign; the last column does not count."""
    assert errors(-TRUTH[:, ::-1].astype(np.float64), TRUTH).max() == 0
    np.testing.assert_allclose(errors(TRUTH.astype(np.float64) + 0.25 * TRUTH.std(0), TRUTH), 0.25, rtol=1e-5)
    assert errors(np.zeros((10, 1)), TRUTH).min() > 0.9
