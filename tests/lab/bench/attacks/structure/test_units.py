"""Groups by zero patterns, by activity and by independent components, and their score, against known answers."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.structure.fleet import (
    Network,
    agreement,
    analyse,
    by_activity,
    by_silence,
    neighbours,
    one_hot,
    share_assigned,
    silent_patterns,
    whiten,
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
def test_zero_patterns_find_every_unit(flip):
    """Under a permutation, with signs and without."""
    rng, clear = np.random.default_rng(7), updates(200)
    places = rng.permutation(NETWORK.length)
    signs = rng.choice([-1, 1], NETWORK.length) if flip else np.ones(NETWORK.length)
    seen = (clear[:, places] * signs).astype(np.float32)
    labels = by_silence(seen, silent_patterns(seen, NETWORK.hidden))
    assert share_assigned(labels, one_hot(NETWORK.unit[places], NETWORK.hidden)) > 0.99


def test_no_pattern_if_all_coordinates_move():
    """No pattern where every coordinate moves."""
    turn = np.linalg.qr(np.random.default_rng(7).standard_normal((NETWORK.length, NETWORK.length)))[0]
    seen = (updates(200) @ turn).astype(np.float32)
    assert len(set(by_silence(seen, silent_patterns(seen, NETWORK.hidden)))) <= 2


@pytest.mark.parametrize(
    ("labels", "share"), [([1, 1, 0, 0, 0], 1), ([0, 0, 0, 0, 0], 0.5), ([-1, -1, 0, 0, 0], 0.5), ([-1] * 5, 0)]
)
def test_the_score_takes_the_best_matching(labels, share):
    assert share_assigned(np.array(labels), one_hot(np.array([0, 0, 1, 1, 2]), 2)) == share


def test_neighbours_correlate_most():
    rng = np.random.default_rng(2)
    a, b = rng.standard_normal((2, 50)).astype(np.float32)
    noise = 0.1 * rng.standard_normal((4, 50)).astype(np.float32)
    found = neighbours(np.stack([a + noise[0], b + noise[1], -a + noise[2], b + noise[3]], 1))
    assert found.tolist() == [2, 3, 0, 1]
    energies = one_hot(np.array([0, 1, 0, 1]), 2)
    assert (agreement(found, energies), agreement(np.array([1, 0, 3, 2]), energies)) == (1, 0)


def test_active_together_is_one_group():
    rng = np.random.default_rng(3)
    on = np.array([[1, 1, 0, 0], [0, 0, 1, 1]])[rng.integers(0, 2, 200)]
    labels = by_activity(on * rng.standard_normal((200, 4)), 2)
    assert labels[0] == labels[1] != labels[2] == labels[3]
    assert by_activity(np.ones((5, 3)), 4).tolist() == [0, 1, 2]


def sources(n, d):
    """Return a rotation and sparse sources (n, d) under it."""
    rng = np.random.default_rng(0)
    clear = (rng.standard_normal((n, d)) * (rng.random((n, d)) < 0.1)).astype(np.float32)
    turn = np.linalg.qr(rng.standard_normal((d, d)))[0].astype(np.float32)
    return turn, clear @ turn.T


def peaks(directions, turn):
    """Return the largest share of one source in each direction."""
    clear = (directions @ turn) ** 2
    return (clear.max(1) / clear.sum(1)).mean()


def test_sources_are_found_from_many_vectors():
    """Not from few, and not by a random mixture of the principal components."""
    turn, seen = sources(2000, 20)
    assert peaks(analyse(seen).directions, turn) > 0.9
    assert peaks(analyse(seen, rng=np.random.default_rng(1)).directions, turn) < 0.5
    turn, seen = sources(20, 200)
    assert peaks(analyse(seen).directions, turn) < 0.35


@pytest.mark.parametrize(("n", "d"), [(30, 100), (100, 30)])
def test_components_are_uncorrelated(n, d):
    """With variance 1; with fewer vectors than coordinates and with more."""
    _, seen = sources(n, d)
    white, rows = whiten(seen, 10)
    assert np.allclose(white.T @ white / n, np.eye(10), atol=1e-3)
    assert np.allclose(rows.mean(0), 0, atol=1e-5)
    assert [analyse(seen, most).directions.shape for most in (7, 0)] == [(7, d), (min(n // 2, d), d)]
