"""Features of a coordinate that do not depend on its place, and on its sign."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.layer_statistics import features


def values(rounds=3, devices=4, d=5):
    return np.random.default_rng(0).standard_normal((rounds, devices, d)).astype(np.float32)


def test_features_move_with_the_coordinate():
    seen = values()
    order = np.array([3, 0, 4, 1, 2])
    np.testing.assert_allclose(features(seen[..., order]), features(seen)[order])


def test_flipped_coordinates_have_the_same_features():
    """A signed permutation hides no more of the layer than a plain one."""
    seen = values()
    flipped = seen * np.array([1, -1, 1, -1, -1], np.float32)
    np.testing.assert_allclose(features(flipped), features(seen), rtol=1e-6)


def test_features_by_hand():
    """One coordinate, two rounds of two devices: 1, 3 and -2, 0."""
    seen = np.array([[[1.0], [3.0]], [[-2.0], [0.0]]], np.float32)
    (found,) = features(seen)
    sizes, spread = 1.5, np.std([1, 3, -2, 0])
    expected = [np.log(sizes), np.log(3), np.log(1.5), 0.25, np.log(sizes / spread), np.log(2), np.log(1)]
    np.testing.assert_allclose(found, expected, atol=1e-9)


@pytest.mark.parametrize("rounds", [1, 2])
def test_a_coordinate_that_never_moved_has_finite_features(rounds):
    found = features(np.zeros((rounds, 2, 3), np.float32))
    assert np.isfinite(found).all()
    assert found[:, 3].tolist() == [1.0] * 3
