"""Robust weights from a Gram matrix: the published definitions, and what false updates can do under each rule."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types

import numpy as np
import pytest
from scipy.optimize import minimize

from aggregator.numerics import robust
from aggregator.numerics.checks import NumericsError
from aggregator.numerics.robust import (
    FALSE_SHARE,
    RULES,
    _within,
    centred_clipping,
    geometric_median,
    most_false,
    multi_krum,
    nearest_neighbour_mixing,
    opposed,
    robust_weights,
)
from shoal import limits

N, D = 10, 40
EVERY = tuple(rule for rule in limits.ROBUST_RULES if rule != "off")
EQUAL = np.ones(N)


def vectors(seed=0, n=N, spread=1.0, common=0.7):
    """Return updates (n, D) with a common direction."""
    rng = np.random.default_rng(seed)
    return common * np.ones(D) / np.sqrt(D) * np.sqrt(D) / 6 + spread * rng.standard_normal((n, D)) / np.sqrt(D)


def mean_by(rule, rows, weights=None, before=None):
    weights = np.ones(len(rows)) if weights is None else np.asarray(weights, float)
    found = robust_weights(rule, rows @ rows.T, weights, before)
    return found, found.values @ rows / weights.sum()


def attacked(factor, seed=0):
    """Return honest updates, the last three times ``factor``."""
    rows = vectors(seed)
    rows[-3:] *= factor
    return rows


def test_the_plan_knows_exactly_these_rules():
    assert set(limits.ROBUST_RULES) == {"off", robust.FILTER, *RULES}


@pytest.mark.parametrize("rule", limits.ROBUST_RULES)
def test_few_updates_have_plain_weights(rule):
    """Fewer than four updates have their plain weights."""
    found, _ = mean_by(rule, np.vstack([np.ones((2, D)), -100 * np.ones((1, D))]), [3, 1, 2])
    assert found.values.tolist() == [3, 1, 2]
    assert not found.apart.any()


@pytest.mark.parametrize("rule", EVERY)
@pytest.mark.parametrize("factor", [-1.0, -10.0, 9.0, -100.0])
def test_three_false_of_ten_do_little(rule, factor):
    """Three of ten false updates leave the mean near the honest one."""
    rows = attacked(factor)
    honest = rows[:-3].mean(0)
    _, found = mean_by(rule, rows)
    cosine = found @ honest / np.linalg.norm(found) / np.linalg.norm(honest)
    assert cosine > 0.8
    assert np.linalg.norm(found) < 1.5 * np.linalg.norm(honest)
    if factor < -1:
        assert rows.mean(0) @ honest < 0


@pytest.mark.parametrize("rule", ["filter", "multi-krum"])
def test_sign_flips_get_no_weight(rule):
    """Sign flips get no weight and stand apart."""
    found, mean = mean_by(rule, attacked(-1.0))
    assert not found.values[-3:].any()
    assert found.apart.tolist() == [False] * 7 + [True] * 3
    assert found.values.sum() == pytest.approx(N)
    np.testing.assert_allclose(mean, attacked(-1.0)[:-3].mean(0))


@pytest.mark.parametrize("rule", EVERY)
def test_equal_updates_keep_their_mean(rule):
    rows = np.tile(vectors()[:1], (N, 1))
    found, mean = mean_by(rule, rows, np.arange(1, N + 1))
    np.testing.assert_allclose(mean, rows[0], rtol=1e-9)
    assert (found.values >= 0).all()


@pytest.mark.parametrize("rule", EVERY)
def test_updates_of_length_zero_have_a_mean(rule):
    found, _ = mean_by(rule, np.zeros((N, D)))
    assert np.isfinite(found.values).all()
    assert found.values.sum() > 0
    assert np.isfinite(mean_by(rule, np.vstack([np.zeros((6, D)), vectors(n=4)]))[1]).all()


@pytest.mark.parametrize("rule", EVERY)
def test_no_rule_is_found_by_another_name(rule):
    with pytest.raises(NumericsError, match="no robust rule"):
        robust_weights(rule.upper(), np.eye(N), EQUAL)
    with pytest.raises(NumericsError):
        robust_weights(rule, np.full((N, N), np.nan), EQUAL)
    with pytest.raises(NumericsError):
        robust_weights(rule, np.eye(N), np.zeros(N))


@pytest.mark.parametrize(("count", "expected"), [(3, 0), (4, 0), (5, 1), (10, 3), (20, 6)])
def test_krum_takes_so_many_for_false(count, expected):
    assert most_false(count) == expected
    assert expected <= FALSE_SHARE * count


# --- The filter ---


def test_filter_leaves_honest_updates():
    """The filter leaves honest updates exactly as they are."""
    for spread, common in ((1.0, 0.7), (1.0, 0.0), (1.0, 0.2)):
        for seed in range(50):
            rows = vectors(seed, spread=spread, common=common)
            weights = np.random.default_rng(seed).integers(1, 400, N).astype(float)
            assert mean_by("filter", rows, weights)[0].values.tobytes() == weights.tobytes()


def groups(*sizes, seed=0, noise=0.5):
    """Return the updates of groups whose directions sum up to 0 when they are of equal size."""
    rng = np.random.default_rng(seed)
    count = len(sizes)
    axes = np.eye(count, D) - np.vstack([np.full((count, count), 1 / count).T, np.zeros((D - count, count))]).T
    rows = np.repeat(axes, sizes, axis=0)
    return rows + noise * rng.standard_normal(rows.shape) / np.sqrt(D)


@pytest.mark.parametrize("sizes", [(5, 5, 5, 5), (10, 10), (4, 4), (5, 5), (3, 3, 3), (12, 8)])
def test_filter_takes_no_side_between_groups(sizes):
    for seed in range(20):
        rows = groups(*sizes, seed=seed)
        assert not opposed(*_within(rows @ rows.T), np.zeros(len(rows), bool)).any()


def test_filter_ignores_weights():
    """The filter looks at devices not at their weights."""
    found, _ = mean_by("filter", attacked(-1.0), [1] * 7 + [3] * 3)
    assert found.against.tolist() == [False] * 7 + [True] * 3


def test_left_out_until_all_agree_again():
    """What was left out stays out until the others agree again and it agrees with them."""
    before = np.arange(N) >= 7
    apart, together = vectors(3, common=0.0), vectors(3)
    assert opposed(*_within(apart @ apart.T), before).tolist() == before.tolist()
    assert not opposed(*_within(together @ together.T), before).any()
    assert not opposed(*_within(apart @ apart.T), np.zeros(N, bool)).any()
    # Of half of the updates nobody can say which half is false.
    assert not opposed(*_within(apart @ apart.T), np.arange(N) >= 5).any()


def test_filter_shortens_to_the_median():
    """The filter shortens long updates to the median norm."""
    rows = vectors()
    rows[2] *= 5
    found, _ = mean_by("filter", rows)
    norms = np.linalg.norm(rows, axis=1)
    assert found.values[2] == pytest.approx(np.median(norms) / norms[2])
    assert np.delete(found.values, 2).tolist() == pytest.approx([1.0] * 9)
    assert found.apart.tolist() == [i == 2 for i in range(N)]


def test_filter_leaves_small_clusters_alone():
    rows = vectors(n=7)
    rows[0] *= -5
    assert mean_by("filter", rows)[0].values.tolist() == [1.0] * 7
    rows = np.vstack([rows, vectors(9, n=1)])
    assert mean_by("filter", rows)[0].against.tolist() == [True] + [False] * 7


# --- Published definitions, computed in another way ---


def test_rfa_is_the_geometric_median():
    for seed in range(5):
        rows, weights = attacked(-4.0, seed), np.random.default_rng(seed).uniform(1, 5, N)
        shares = weights / weights.sum()
        best = minimize(lambda v, r=rows, s=shares: s @ np.linalg.norm(r - v, axis=1), rows.mean(0), tol=1e-12)
        np.testing.assert_allclose(geometric_median(rows @ rows.T, shares) @ rows, best.x, atol=1e-4)


def test_multi_krum_takes_the_least_scores():
    """Multi krum is the mean of the updates of least score."""
    for seed in range(20):
        rows, f = attacked(-2.0, seed), 3
        score = [sum(sorted(((rows - row) ** 2).sum(1))[: N - f]) for row in rows]
        best = sorted(range(N), key=lambda i, s=score: s[i])[: N - f]
        np.testing.assert_allclose(multi_krum(rows @ rows.T, EQUAL / N, f) @ rows, rows[best].mean(0), atol=1e-12)


def test_centred_clipping_follows_its_steps():
    for seed in range(5):
        rows, v, tau = attacked(-10.0, seed), np.zeros(D), 0.8
        for _ in range(7):
            differences = rows - v
            lengths = np.linalg.norm(differences, axis=1)
            v = v + (differences * np.minimum(1, tau / lengths)[:, None]).mean(0)
        np.testing.assert_allclose(centred_clipping(rows @ rows.T, EQUAL / N, tau, 7) @ rows, v, atol=1e-12)


def test_neighbours_are_mixed_first():
    """Neighbours are mixed before multi krum."""
    for seed in range(20):
        rows, f = attacked(-2.0, seed), 3
        mixed = np.array([rows[np.argsort(((rows - row) ** 2).sum(1))[: N - f]].mean(0) for row in rows])
        expected = multi_krum(mixed @ mixed.T, EQUAL / N, f) @ mixed
        np.testing.assert_allclose(nearest_neighbour_mixing(rows @ rows.T, EQUAL / N, f) @ rows, expected, atol=1e-9)


@pytest.fixture
def byzfl(monkeypatch):
    """The rules of byzfl (MIT), without its training code, which needs torchvision.

    torchvision's wheels on the index are linked against torch with CUDA and do not load beside the CPU build that `make` takes.
    """
    found = importlib.util.find_spec("byzfl")
    if found is None:
        pytest.skip(
            "byzfl is not installed: `make` adds it with `pip install --no-deps byzfl`; no extra can say --no-deps"
        )
    package = types.ModuleType("byzfl")
    package.__path__ = list(found.submodule_search_locations)
    monkeypatch.setitem(sys.modules, "byzfl", package)
    return importlib.import_module("byzfl.aggregators")


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("factor", [-1.0, -10.0])
def test_byzfl_finds_the_same_means(byzfl, seed, factor):
    rows = attacked(factor, seed)
    gram, f = rows @ rows.T, 3
    same = {
        "multi-krum": (multi_krum(gram, EQUAL / N, f), byzfl.MultiKrum(f)(rows)),
        "nnm": (nearest_neighbour_mixing(gram, EQUAL / N, f), byzfl.MultiKrum(f)(byzfl.NNM(f)(rows))),
        "rfa": (geometric_median(gram, EQUAL / N), byzfl.GeometricMedian(nu=1e-6, T=300)(rows)),
        "centred-clipping": (centred_clipping(gram, EQUAL / N, 0.8, 9), byzfl.CenteredClipping(L=9, tau=0.8)(rows)),
    }
    for rule, (shares, expected) in same.items():
        np.testing.assert_allclose(shares @ rows, expected, atol=1e-6, err_msg=rule)
