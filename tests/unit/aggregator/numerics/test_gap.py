"""The separation gap and the separation theorem's bounds (cfl Def. 2, Thm 1, Eqs 19 to 21 and 37 to 39)."""

from __future__ import annotations

import math

import numpy as np
import pytest

from aggregator.numerics.errors import NumericsError
from aggregator.numerics.gap import (
    cross_max_bound,
    gamma_limit,
    is_safe_split,
    overlap,
    separation_gap,
    theorem_bounds,
)
from aggregator.numerics.similarity import cosine_matrix


def test_a_gap_by_hand() -> None:
    """Devices 0, 2 and 1, 3 are groups; the best cut is between them at 0.1, the loosest pair inside at 0.7."""
    similarity = np.array([[1.0, 0.1, 0.9, 0.0], [0.1, 1.0, -0.2, 0.7], [0.9, -0.2, 1.0, 0.05], [0.0, 0.7, 0.05, 1.0]])
    found = separation_gap(similarity, [5, 8, 5, 8])
    assert (found.intra_min, found.cross_max) == (0.7, 0.1)
    assert found.gap == pytest.approx(0.6)


def test_crossed_groups_have_no_gap() -> None:
    """Groups that the best cut crosses have no positive gap."""
    similarity = np.where(np.arange(4)[:, None] // 2 == np.arange(4)[None, :] // 2, 0.9, -0.5)
    assert separation_gap(similarity, [0, 0, 1, 1]).gap > 0
    assert separation_gap(similarity, [0, 1, 0, 1]).gap <= 0


def test_groups_of_one_have_no_pair() -> None:
    """Groups of one device have no pair to be dissimilar."""
    assert separation_gap(np.array([[1.0, 0.3], [0.3, 1.0]]), [0, 1]).intra_min == 1.0


def test_unlike_groups_are_refused() -> None:
    """Groups of another length are refused."""
    with pytest.raises(NumericsError, match="3 groups for 2 devices"):
        separation_gap(np.eye(2), [0, 1, 1])


@pytest.mark.parametrize(("cross", "limit"), [(1.0, 0.0), (-1.0, 1.0), (0.5, 0.5), (0.0, math.sqrt(0.5))])
def test_gamma_limit_by_hand(cross: float, limit: float) -> None:
    assert gamma_limit(cross) == pytest.approx(limit)
    assert not is_safe_split(cross, gamma_limit(cross))
    assert limit == 0 or is_safe_split(cross, limit - 1e-9)


@pytest.mark.parametrize("gamma", [0.0, 0.2, 0.7, 0.99])
def test_limit_and_overlap_are_one_test(gamma: float) -> None:
    """Eq. 39 holds exactly where the overlap of the two noisiest devices exceeds the cross similarity."""
    estimate = overlap(gamma, gamma)
    assert estimate == pytest.approx(1.0 - 2.0 * gamma**2)  # Eqs 37 and 38
    for cross in (-0.95, -0.3, 0.2, 0.9):
        assert is_safe_split(cross, gamma) == (estimate > cross)


@pytest.mark.parametrize("value", [-1.0, -0.4, 0.3, 1.0])
def test_two_distributions_give_minus_h(value: float) -> None:
    """Remark 1, Eq. 22."""
    assert cross_max_bound(2, value) == pytest.approx(-value)


def test_bound_beyond_the_angle_is_one() -> None:
    assert cross_max_bound(5, math.cos(math.pi / 4) - 1e-3) == 1.0
    assert cross_max_bound(5, math.cos(math.pi / 4) + 1e-3) < 1.0
    assert cross_max_bound(5, 1.0) == pytest.approx(math.cos(math.pi / 4))


@pytest.mark.parametrize("seed", range(10))
def test_theorem_holds_on_gradients(seed: int) -> None:
    """At a stationary point (weighted true gradients sum to zero) the measured values keep to the bounds."""
    rng = np.random.default_rng(seed)
    kinds, each, length = 3, 4, 20
    true = rng.standard_normal((kinds, length))
    true[-1] = -true[:-1].sum(axis=0)
    groups = np.repeat(np.arange(kinds), each)
    gammas = rng.uniform(0.0, 0.3, kinds * each)
    noise = rng.standard_normal((kinds * each, length))
    noise *= (gammas * np.linalg.norm(true[groups], axis=1) / np.linalg.norm(noise, axis=1))[:, None]
    measured = separation_gap(cosine_matrix((true[groups] + noise).astype(np.float32)), groups.tolist())
    bounds = theorem_bounds(gammas.tolist(), groups.tolist())
    assert measured.intra_min >= bounds.intra_min - 1e-6
    assert measured.cross_max <= bounds.cross_max + 1e-6
    assert bounds.intra_min >= overlap(gammas.max(), gammas.max()) - 1e-12


def test_theorem_bounds_by_hand() -> None:
    """Without noise and with two groups: inside 1, across -1 (Eq. 13)."""
    found = theorem_bounds([0.0, 0.0, 0.0], [0, 0, 1])
    assert (found.intra_min, found.cross_max) == (1.0, pytest.approx(-1.0))


def test_out_of_range_is_refused() -> None:
    for gamma in (-0.1, 1.0, math.nan):
        with pytest.raises(NumericsError, match="gamma"):
            overlap(gamma, 0.5)
    with pytest.raises(NumericsError, match="not a cosine"):
        gamma_limit(1.5)
    with pytest.raises(NumericsError, match="at least 2"):
        cross_max_bound(1, 0.5)
    with pytest.raises(NumericsError, match="two groups"):
        theorem_bounds([0.1, 0.1], [0, 0])
    with pytest.raises(NumericsError, match="1 gammas for 2"):
        theorem_bounds([0.1], [0, 1])
