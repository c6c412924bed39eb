"""What norms and dot products tell: assignments, and the candidate with the nearest norm."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.invariants import _by_loss, _norms, assign, nearest, products, skewed


def test_swaps_find_a_hidden_assignment():
    gram = np.random.default_rng(5).standard_normal((8, 8))
    gram = gram @ gram.T
    order = np.random.default_rng(3).permutation(8)
    found = assign(gram[np.ix_(order, order)], gram, np.random.default_rng(0))
    assert np.array_equal(found, order)
    assert sorted(assign(np.ones((4, 4)), np.ones((4, 4)), np.random.default_rng(0)).tolist()) == [0, 1, 2, 3]


@pytest.mark.torch
def test_skewed_device_is_mostly_one_class(lab):
    found, other = (skewed(lab, lab.private, 3, what) for what in ("a test", "another"))
    assert len(found) == 100
    assert (found.y == 3).sum() >= 80
    assert len(set(found.y.tolist())) > 5
    assert not np.array_equal(found.x, other.x)


@pytest.mark.parametrize(("losses", "share"), [([1.0, 2.0, 3.0], 1.0), ([1.0, 1.0, 3.0], 2 / 3), ([1.0] * 4, 0.25)])
def test_equal_losses_are_guessed_among(losses, share):
    assert _by_loss(np.array(losses)) == pytest.approx(share)


def test_products_and_norms_are_in_float64():
    """Squares of large updates overflow float32, those of small ones underflow."""
    assert products([np.array([1, 2], np.float32), np.array([3, -1], np.float32)]).tolist() == [[5, 1], [1, 10]]
    assert products([np.array([1e25], np.float32)])[0, 0] == pytest.approx(1e50)
    assert _norms([np.array([3e-25, 4e-25], np.float32)])[0] == pytest.approx(5e-25)


def test_nearest_norm_is_relative():
    """1.45 is nearer to 1 in figures, and nearer to 2 in proportion; more rounds outvote one noisy norm."""
    norms = np.array([[1.0], [2.0], [100.0]])
    assert [nearest(norms, np.array([seen])) for seen in (1.4, 1.45, 60.0)] == [0, 1, 2]
    assert nearest(np.array([[1.0, 1.0, 1.0], [1.1, 2.0, 3.0]]), np.array([1.1, 1.05, 1.0])) == 0
