"""Component analysis finds sources that were mixed by an orthogonal map, and a random mixture does not."""

import numpy as np
from shoal_lab.bench.attacks.structure.components import analyse, mixed, whiten


def sources(n, d, seed=0):
    """Return sparse sources (n, d) and the same under a rotation."""
    rng = np.random.default_rng(seed)
    clear = (rng.standard_normal((n, d)) * (rng.random((n, d)) < 0.1)).astype(np.float32)
    turn = np.linalg.qr(rng.standard_normal((d, d)))[0].astype(np.float32)
    return clear, turn, clear @ turn.T


def peaks(directions, turn):
    """Return the largest share of one source in each direction."""
    clear = (directions @ turn) ** 2
    return (clear.max(1) / clear.sum(1)).mean()


def test_sources_are_found_from_many_vectors():
    _, turn, seen = sources(2000, 20)
    assert peaks(analyse(seen).directions, turn) > 0.9
    assert peaks(mixed(seen, np.random.default_rng(1)).directions, turn) < 0.5


def test_sources_are_not_found_from_few_vectors():
    _, turn, seen = sources(20, 200)
    assert peaks(analyse(seen).directions, turn) < 0.35


def test_principal_components_are_uncorrelated_with_variance_one():
    """In both forms, with fewer vectors than coordinates and with more."""
    for n, d in ((30, 100), (100, 30)):
        _, _, seen = sources(n, d)
        white, rows = whiten(seen, 10)
        assert white.shape == (n, 10)
        assert np.allclose(white.T @ white / n, np.eye(10), atol=1e-3)
        assert np.allclose(rows.mean(0), 0, atol=1e-5)


def test_components_are_at_most_as_many_as_asked_for():
    _, _, seen = sources(40, 60)
    assert analyse(seen, 7).directions.shape == (7, 60)
    assert analyse(seen).directions.shape == (20, 60)
