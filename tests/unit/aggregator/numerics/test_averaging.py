"""The weighted mean: exact values, exact bits, refused input."""

from __future__ import annotations

import numpy as np
import pytest

from aggregator.numerics.averaging import BLOCK_COLUMNS, capped_weights, weighted_mean
from aggregator.numerics.checks import NumericsError

RNG = np.random.default_rng(11)
ROWS = RNG.standard_normal((9, BLOCK_COLUMNS + 1001), dtype=np.float32)
WEIGHTS = RNG.integers(1, 700, 9).astype(np.float64)


def test_a_mean_by_hand() -> None:
    """(1 * 2 + 3 * 6) / 4 = 5."""
    updates = np.array([[2.0, 0.0], [6.0, 4.0]], dtype=np.float32)
    np.testing.assert_array_equal(weighted_mean(updates, np.array([1.0, 3.0])), np.array([5.0, 3.0], np.float32))


def test_the_mean_equals_float64_arithmetic() -> None:
    mean = weighted_mean(ROWS, WEIGHTS)
    assert (mean.dtype, mean.shape) == (np.float32, (ROWS.shape[1],))
    np.testing.assert_allclose(mean, np.average(ROWS.astype(np.float64), axis=0, weights=WEIGHTS), atol=1e-6)


def test_list_and_array_have_the_same_bits() -> None:
    expected = weighted_mean(ROWS, WEIGHTS).tobytes()
    assert weighted_mean(list(ROWS), WEIGHTS).tobytes() == expected
    assert weighted_mean(np.asfortranarray(ROWS), WEIGHTS).tobytes() == expected


def test_bits_are_those_of_plain_sums() -> None:
    """The order of the rows is the order of the float32 sums, coordinate by coordinate."""
    total = np.zeros(ROWS.shape[1], dtype=np.float32)
    for row, weight in zip(ROWS, WEIGHTS, strict=True):
        total += row * np.float32(weight)
    assert weighted_mean(ROWS, WEIGHTS).tobytes() == (total / np.float32(WEIGHTS.sum())).tobytes()
    assert weighted_mean(ROWS[::-1], WEIGHTS[::-1]).tobytes() != weighted_mean(ROWS, WEIGHTS).tobytes()


def test_permuted_mean_has_the_same_bits() -> None:
    """The mean of a permutation is the permuted mean bit for bit."""
    order = np.random.default_rng(2).permutation(ROWS.shape[1])
    assert weighted_mean(ROWS[:, order], WEIGHTS).tobytes() == weighted_mean(ROWS, WEIGHTS)[order].tobytes()


def test_a_weight_of_zero_leaves_a_row_out() -> None:
    weights = WEIGHTS.copy()
    weights[4] = 0.0
    kept = np.arange(9) != 4
    assert weighted_mean(ROWS, weights).tobytes() == weighted_mean(ROWS[kept], weights[kept]).tobytes()


@pytest.mark.parametrize("weight", [-1.0, np.nan, np.inf, 1e-13, 1e13])
def test_a_bad_weight_is_refused(weight: float) -> None:
    weights = np.ones(9)
    weights[3] = weight
    with pytest.raises(NumericsError, match="weight 3"):
        weighted_mean(ROWS, weights)


@pytest.mark.parametrize("weights", [np.zeros(9), np.ones(8), np.ones((9, 1))])
def test_weights_that_do_not_fit_are_refused(weights: np.ndarray) -> None:
    with pytest.raises(NumericsError, match="weights"):
        weighted_mean(ROWS, weights)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_row_that_is_not_finite_is_named(bad: float) -> None:
    """Also a row of weight 0 must be finite."""
    updates = ROWS[:, :50].copy()
    updates[6, 7] = bad
    with pytest.raises(NumericsError, match=r"\[6\]"):
        weighted_mean(updates, WEIGHTS)
    weights = WEIGHTS.copy()
    weights[6] = 0.0
    with pytest.raises(NumericsError, match=r"\[6\]"):
        weighted_mean(updates, weights)


@pytest.mark.parametrize("column", [0, BLOCK_COLUMNS - 1, BLOCK_COLUMNS, -1])
def test_it_is_noticed_in_every_block(column: int) -> None:
    updates = ROWS.copy()
    updates[3, column] = np.nan
    with pytest.raises(NumericsError, match=r"\[3\]"):
        weighted_mean(updates, WEIGHTS)


def test_weights_are_added_up_in_given_order() -> None:
    """One after the other, and not more exactly."""
    rng = np.random.default_rng(3)
    rows, weights = rng.standard_normal((200, 5)).astype(np.float32), rng.uniform(1e-12, 1e12, 200)
    total, total_weight = np.zeros(5, np.float32), 0.0
    for row, weight in zip(rows, weights, strict=True):
        total += row * np.float32(weight)
        total_weight += weight
    assert weighted_mean(rows, weights).tobytes() == (total / np.float32(total_weight)).tobytes()


def test_a_sum_beyond_float32_is_refused() -> None:
    with pytest.raises(NumericsError, match="not finite"):
        weighted_mean(np.full((2, 3), 3e38, dtype=np.float32), np.ones(2))


def test_large_finite_means_pass() -> None:
    """Large means whose own sum overflows pass."""
    updates = np.full((1, 1000), 3e38, dtype=np.float32)
    np.testing.assert_array_equal(weighted_mean(updates, np.ones(1)), updates[0])


@pytest.mark.parametrize(
    ("weights", "cap", "expected"),
    [
        ([10, 20, 30], 3.0, [10, 20, 30]),
        ([10, 10, 10, 2**32 - 1], 3.0, [10, 10, 10, 30]),
        ([10, 10, 10, 2**32 - 1], 0.0, [10, 10, 10, 2**32 - 1]),
        ([1, 2, 3, 1000], 1.0, [1, 2, 2.5, 2.5]),
        ([0, 0, 5], 3.0, [0, 0, 5]),
        ([7], 3.0, [7]),
        ([1, 1000], 3.0, [1, 1000]),
    ],
)
def test_no_weight_is_above_the_cap(weights: list[float], cap: float, expected: list[float]) -> None:
    assert capped_weights(np.array(weights, np.float64), cap).tolist() == expected
