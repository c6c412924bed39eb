"""Groups by zero patterns and by activity, and their score, against answers known by hand."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.structure.network import Network
from shoal_lab.bench.attacks.structure.units import (
    agreement,
    by_activity,
    by_silence,
    neighbours,
    one_hot,
    share_assigned,
    silent_patterns,
)

NETWORK = Network(pixels=12, hidden=6)


def updates(n, seed=0):
    """Return clear one-image updates of random models, and of random images with black pixels."""
    rng, rows = np.random.default_rng(seed), []
    for _ in range(n):
        theta = NETWORK.origin(rng) * 3
        x = (rng.random((1, 1, 12)) * (rng.random((1, 1, 12)) < 0.6)).astype(np.float32)
        rows.append(NETWORK.updates(theta, x, rng.integers(0, 10, (1, 1))))
    return np.concatenate(rows)


@pytest.mark.parametrize("flip", [False, True])
def test_zero_patterns_find_every_unit_under_a_permutation(flip):
    """With signs and without."""
    rng, clear = np.random.default_rng(7), updates(200)
    places = rng.permutation(NETWORK.length)
    signs = rng.choice([-1, 1], NETWORK.length) if flip else np.ones(NETWORK.length)
    seen = (clear[:, places] * signs).astype(np.float32)
    labels = by_silence(seen, silent_patterns(seen, NETWORK.hidden))
    assert share_assigned(labels, one_hot(NETWORK.unit[places], NETWORK.hidden)) > 0.99


def test_zero_patterns_show_nothing_where_every_coordinate_moves():
    rng, clear = np.random.default_rng(7), updates(200)
    turn = np.linalg.qr(rng.standard_normal((NETWORK.length, NETWORK.length)))[0]
    seen = (clear @ turn).astype(np.float32)
    labels = by_silence(seen, silent_patterns(seen, NETWORK.hidden))
    assert len(set(labels)) <= 2


def test_the_score_takes_the_best_matching_of_groups_to_units():
    energies = one_hot(np.array([0, 0, 1, 1, 2]), 2)
    assert share_assigned(np.array([1, 1, 0, 0, 0]), energies) == 1
    assert share_assigned(np.array([0, 0, 0, 0, 0]), energies) == 0.5
    assert share_assigned(np.array([-1, -1, 0, 0, 0]), energies) == 0.5
    assert share_assigned(np.full(5, -1), energies) == 0


def test_neighbours_are_the_most_correlated_columns():
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, 50)).astype(np.float32)
    noise = 0.1 * rng.standard_normal((4, 50)).astype(np.float32)
    found = neighbours(np.stack([a + noise[0], b + noise[1], -a + noise[2], b + noise[3]], 1))
    assert found.tolist() == [2, 3, 0, 1]
    energies = one_hot(np.array([0, 1, 0, 1]), 2)
    assert agreement(found, energies) == 1
    assert agreement(np.array([1, 0, 3, 2]), energies) == 0
    assert agreement(np.array([1, 0]), np.full((2, 4), 0.25)) == pytest.approx(0.25)


def test_components_that_are_active_together_are_one_group():
    rng = np.random.default_rng(3)
    on = np.array([[1, 1, 0, 0], [0, 0, 1, 1]])[rng.integers(0, 2, 200)]
    labels = by_activity(on * rng.standard_normal((200, 4)), 2)
    assert labels[0] == labels[1] != labels[2] == labels[3]
    assert by_activity(np.ones((5, 3)), 4).tolist() == [0, 1, 2]
