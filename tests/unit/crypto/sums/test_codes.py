"""Codes of updates: they add up as updates do, and no other vector has them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.sums.codes import CHECKS, PRIME, added, check_pads, code, hidden_codes, matches, opened_codes
from crypto.sums.ring import LARGEST_SUM

KEY, MODEL = b"k" * 32, 3
KNOWN = (1344504767, 941359765)


def updates_of(seed, count, length):
    rng = np.random.default_rng(seed)
    most = LARGEST_SUM // count
    return rng.integers(-most, most, (count, length), endpoint=True).astype(np.int32)


@given(st.integers(0, 2**32), st.integers(1, 20), st.integers(1, 40_000))
def test_code_of_a_sum(seed, count, length):
    updates = updates_of(seed, count, length)
    seeds = [bytes([at]) * 32 for at in range(count)]
    padded = [hidden_codes(code(u, KEY, {MODEL: 1}), s) for u, s in zip(updates, seeds, strict=True)]
    told = opened_codes(added(padded), added(check_pads(s, CHECKS) for s in seeds))
    assert matches(updates.sum(0, dtype=np.int64).astype(np.int32), KEY, {MODEL: count}, told)
    assert all(0 <= one < PRIME for one in told)


@pytest.mark.parametrize("length", [1, 1 << 14, (1 << 14) + 1, 50_000])
@pytest.mark.parametrize("value", [-(2**31), -1, 0, 1, 2**31 - 1])
def test_code_is_exact(length, value):
    """Against whole numbers of any size."""
    one = np.zeros(length, np.int32)
    one[-1] = 1
    row = (np.array(code(one, KEY, {0: 0})) - code(np.zeros(length, np.int32), KEY, {0: 0})) % PRIME
    values = np.zeros(length, np.int32)
    values[-1] = value
    assert code(values, KEY, {0: 0}) == tuple(int(r) * value % PRIME for r in row)


def test_crafted_sums_have_other_codes():
    total = updates_of(5, 6, 300).sum(0, dtype=np.int64).astype(np.int32)
    told = code(total, KEY, {MODEL: 6})
    rng = np.random.default_rng(6)
    crafted = [
        (rng.permutation(total), {MODEL: 6}),
        (total // 2, {MODEL: 3}),
        (total, {MODEL: 5}),
        (total, {MODEL + 1: 6}),
        (total + np.eye(1, 300, 7, np.int32)[0], {MODEL: 6}),
        (total ^ np.int32(-(2**31)), {MODEL: 6}),
        (-total, {MODEL: 6}),
        *((rng.integers(-(2**31), 2**31 - 1, 300).astype(np.int32), {MODEL: 6}) for _ in range(1000)),
    ]
    assert not any(matches(values, KEY, counts, told) for values, counts in crafted)
    assert not matches(total, b"o" * 32, {MODEL: 6}, told)


def test_pads_hide_codes():
    first, second = (hidden_codes((1, 2), bytes([at]) * 32) for at in (1, 2))
    assert first != second != (1, 2)
    assert opened_codes(first, check_pads(bytes([1]) * 32, 2)) == (1, 2)


def test_known_codes():
    assert code(np.array([1, -2, 3], np.int32), KEY, {MODEL: 2}) == KNOWN
