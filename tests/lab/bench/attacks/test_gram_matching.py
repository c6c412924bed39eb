"""Assignments found from dot products."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.gram_matching import assign, products, skewed

RNG_SEED = 5


def normal(*shape, seed=RNG_SEED):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_swaps_find_a_hidden_assignment():
    gram = normal(8, 8).astype(float)
    gram = gram @ gram.T
    order = np.random.default_rng(3).permutation(8)
    found = assign(gram[np.ix_(order, order)], gram, np.random.default_rng(0))
    assert np.array_equal(found, order)


def test_dot_products_are_of_every_pair():
    assert products([np.array([1, 2], np.float32), np.array([3, -1], np.float32)]).tolist() == [[5, 1], [1, 10]]


def test_dot_products_are_in_float64():
    """Squares of large updates overflow float32."""
    assert products([np.array([1e25], np.float32)])[0, 0] == pytest.approx(1e50)


@pytest.mark.torch
def test_a_skewed_device_has_four_fifths_of_one_class(lab):
    found = skewed(lab, lab.private, 3, "a test")
    assert len(found) == 100
    assert (found.y == 3).sum() >= 80
    assert len(set(found.y.tolist())) > 5
    again, other = (skewed(lab, lab.private, 3, what) for what in ("a test", "another"))
    assert np.array_equal(found.x, again.x)
    assert not np.array_equal(found.x, other.x)


def test_two_devices_that_look_alike_are_assigned_once_each():
    gram = np.ones((4, 4))
    assert sorted(assign(gram, gram, np.random.default_rng(0)).tolist()) == [0, 1, 2, 3]
