"""Robust means commute with every mask, and no rule gives a device more than its share."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from aggregator.numerics.robust import robust_weights
from aggregator.strategies.robust import RobustMean
from crypto.mask.masking import mask
from crypto.mask.modes.registry import MODES
from shoal import limits
from shoal.protocol.documents import SegmentSpec
from tests.helpers.masks import key_of
from tests.helpers.plans import contribution, run_plan

D = 3000
COUNT = 10
RULES = tuple(rule for rule in limits.ROBUST_RULES if rule != "off")


def updates(seed: int, factor: float, skew: float) -> np.ndarray:
    """Return honest updates (10, D) with a common part, the last three times ``factor``."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal(D) + skew * rng.standard_normal((COUNT, D))
    rows[-3:] *= factor
    return rows.astype(np.float32)


def are_apart(rows: np.ndarray) -> bool:
    """Whether no two updates are as near to a third one, up to rounding: who of them is nearer decides the rule ``nnm``."""
    squares = ((rows[:, None, :].astype(np.float64) - rows[None, :, :]) ** 2).sum(2)
    near = np.sort(squares, axis=1)[:, 1:]
    return bool((np.diff(near, axis=1) > 1e-5 * near[:, 1:]).all())


@given(
    st.sampled_from(RULES),
    st.sampled_from(sorted(MODES)),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, -1.0, 9.0, -9.0]),
    st.floats(0.1, 10.0),
)
def test_masked_robust_mean_is_the_clear_one(rule: str, mode: str, seed: int, factor: float, skew: float) -> None:
    """The robust mean of masked updates is the masked mean."""
    key = key_of(mode, D)
    run = run_plan(robust=rule, segments=(SegmentSpec("cluster", D),))
    rows = updates(seed, factor, skew)
    assume(rule != "nnm" or are_apart(rows))
    clear = [contribution(f"dev-{i}", row, samples=10 + i) for i, row in enumerate(rows)]
    masked = [contribution(c.device, mask(c.row, key).values, samples=c.samples) for c in clear]
    expected = mask(RobustMean(run)(clear, "samples", 3.0), key).values
    found = RobustMean(run)(masked, "samples", 3.0)
    assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)


@given(
    st.sampled_from(RULES),
    st.integers(4, 12),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
    st.floats(1e-3, 1e3),
)
def test_weights_add_up_to_the_plain_at_most(rule: str, count: int, length: int, seed: int, size: float) -> None:
    """Weights are not negative and add up to no more than the plain ones."""
    rng = np.random.default_rng(seed)
    rows = size * rng.standard_normal((count, length)) ** 3
    plain = rng.integers(0, 100, count).astype(float)
    plain[0] = 1.0
    found = robust_weights(rule, rows @ rows.T, plain, rng.random(count) < 0.3)
    assert (found.values >= 0).all()
    assert 0 < found.values.sum() <= plain.sum() * (1 + 1e-9)
    assert 2 * found.against.sum() < count
    assert not found.values[found.against].any() or not plain[~found.against].any()


@given(st.sampled_from(RULES), st.integers(0, 2**32 - 1), st.permutations(range(COUNT)))
def test_order_of_devices_does_not_matter(rule: str, seed: int, order: list[int]) -> None:
    rows = updates(seed, -1.0, 1.0).astype(float)
    plain = np.arange(1.0, COUNT + 1)
    one = robust_weights(rule, rows @ rows.T, plain).values
    other = robust_weights(rule, rows[order] @ rows[order].T, plain[order]).values
    np.testing.assert_allclose(other, one[order], atol=1e-6)


@pytest.mark.parametrize("rule", limits.ROBUST_RULES)
def test_longest_updates_have_a_mean(rule: str) -> None:
    """Products of such updates overflow float32."""
    run = run_plan(robust=rule, segments=(SegmentSpec("cluster", D),))
    rows = updates(0, 1.0, 1.0) * np.float32(1e30)
    given_ = [dataclasses.replace(contribution(f"dev-{i}", row), norm=1e30 * 80) for i, row in enumerate(rows)]
    assert np.isfinite(RobustMean(run)(given_, "uniform")).all()
