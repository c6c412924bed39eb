"""Identification of an update's data by its norm, or by the reported loss."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.identification import _by_loss, _norms, nearest


def test_the_nearest_norm_is_relative_to_its_size():
    """1.45 is nearer to 1 in figures, and nearer to 2 in proportion: 2 / 1.45 < 1.45 / 1."""
    norms = np.array([[1.0], [2.0], [100.0]])
    assert nearest(norms, np.array([1.45])) == 1
    assert nearest(norms, np.array([1.4])) == 0
    assert nearest(norms, np.array([60.0])) == 2


def test_more_rounds_outvote_one_noisy_norm():
    norms = np.array([[1.0, 1.0, 1.0], [1.1, 2.0, 3.0]])
    assert nearest(norms, np.array([1.1, 1.05, 1.0])) == 0


@pytest.mark.parametrize(("losses", "share"), [([1.0, 2.0, 3.0], 1.0), ([1.0, 1.0, 3.0], 2 / 3), ([1.0] * 4, 0.25)])
def test_equal_losses_are_guessed_among(losses, share):
    assert _by_loss(np.array(losses)) == pytest.approx(share)


def test_norms_are_in_float64():
    """Squares of a small update underflow in float32."""
    assert _norms([np.array([3e-25, 4e-25], np.float32)])[0] == pytest.approx(5e-25)
