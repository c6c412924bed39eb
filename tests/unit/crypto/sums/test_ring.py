"""Fixed-point numbers modulo 2^32, and the pads that hide them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.sums.ring import LARGEST_SUM, SHORT_BITS, add_pad, extended, hidden, mean_of, short, unit_of
from shoal.errors import IntegrityError


def opened(words, seeds):
    pads = np.zeros(len(words), np.uint32)
    for seed in seeds:
        add_pad(pads, seed)
    return words - pads


@given(st.integers(0, 2**32), st.integers(1, 40), st.integers(1, 600_000))
def test_sum_is_exact(seed, count, length):
    rng = np.random.default_rng(seed)
    length = min(length, 1 + 600_000 // count)
    unit = unit_of(1000.0, length, count)
    updates = rng.normal(size=(count, length)).astype(np.float32)
    seeds = [rng.bytes(32) for _ in range(2 * count)]
    total = np.zeros(length, np.uint32)
    for at, update in enumerate(updates):
        total += hidden(update, unit, count, seeds[2 * at : 2 * at + 2])
    whole = np.rint(updates.astype(np.float64) / unit).astype(np.int64).sum(0)
    assert (opened(total, seeds).view(np.int32) == whole).all()


def test_pad_is_chacha20_from_zero():
    # RFC 7539, A.1, test vector 1: the key and the nonce are zero.
    words = np.zeros(4, np.uint32)
    add_pad(words, bytes(32))
    assert words.astype("<u4").tobytes().hex() == "76b8e0ada0f13d90405d6ae55386bd28"


def test_pads_of_blocks_are_one_keystream():
    long, short = np.zeros((1 << 18) + 5, np.uint32), np.zeros(7, np.uint32)
    add_pad(long, b"s" * 32)
    add_pad(short, b"s" * 32)
    assert (long[:7] == short).all()
    assert len(np.unique(long)) > (1 << 18) - 100


def test_words_alone_are_uniform():
    words = hidden(np.zeros(100_000, np.float32), 1.0, 3, [b"k" * 32])
    assert abs(words.astype(np.float64).mean() / 2**32 - 0.5) < 0.005


@pytest.mark.parametrize("value", [np.nan, np.inf, -2.0, 2.0])
def test_too_large_to_be_added(value):
    unit = unit_of(1.0, 4, 3)
    with pytest.raises(IntegrityError, match="too large"):
        hidden(np.array([0, 0, 0, value], np.float32), unit, 3, [])


def test_most_updates_fit_the_ring():
    most, unit = 1000, unit_of(1.0, 4, 1000)
    assert int(hidden(np.full(4, 0.999999, np.float32), unit, most, [])[0]) * most <= LARGEST_SUM


def test_wrong_pad_is_refused():
    unit = unit_of(10.0, 1000, 3)
    words = hidden(np.full(1000, 0.01, np.float32), unit, 3, [b"a" * 32])
    with pytest.raises(IntegrityError, match="above the limit"):
        mean_of(opened(words, [b"b" * 32]), 1, unit, 10.0)


def test_mean_is_close_to_float():
    updates = np.random.default_rng(1).normal(size=(20, 5000)).astype(np.float32) / 70
    unit = unit_of(1000.0, 5000, 64)
    mean = mean_of(sum(hidden(u, unit, 64, []) for u in updates), 20, unit, 1000.0)
    error = np.linalg.norm(mean - updates.mean(0)) / np.linalg.norm(updates.mean(0))
    assert error < 1e-3


@given(st.integers(0, 2**32), st.integers(3, 64))
def test_short_sum_is_exact(seed, count):
    rng = np.random.default_rng(seed)
    updates = (rng.normal(size=(count, 2000)) * rng.uniform(0.5, 3, (count, 1))).astype(np.float32)
    unit = unit_of(2 * 45.0, 2000, 64, SHORT_BITS)
    total, whole = np.zeros(2000, np.uint16), np.zeros(2000, np.int64)
    for update in updates:
        words = short(update, unit, 64)
        whole += words.view(np.int32)
        total += words.astype(np.uint16)
    assert (extended(total.astype(np.uint32)).view(np.int32) == whole).all()


def test_longer_update_is_scaled_down():
    update = np.random.default_rng(1).normal(size=5000).astype(np.float32)
    unit = unit_of(float(np.linalg.norm(update)) / 4, 5000, 64, SHORT_BITS)
    words = short(update, unit, 64).view(np.int32)
    assert np.abs(words).max() == ((1 << 15) - 1) // 64
    assert np.corrcoef(words, update)[0, 1] > 0.9999


@pytest.mark.parametrize("rms", [0.9, 1e-6, 1e-15])
def test_short_update_is_scaled_up(rms):
    """Steps that are larger than an update would leave the sum to longer ones."""
    update = np.random.default_rng(3).normal(size=5000).astype(np.float32) * np.float32(rms)
    words = short(update, 1.0, 64).view(np.int32)
    assert 0.9 < np.sqrt(np.mean(words.astype(float) ** 2)) < 1.2
    assert np.corrcoef(words, update.astype(np.float64))[0, 1] > 0.9


def test_no_update_stays_none():
    assert not short(np.zeros(100, np.float32), 1.0, 64).any()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_short_update_that_is_none(value):
    with pytest.raises(IntegrityError, match="NaN or infinities"):
        short(np.array([1, value], np.float32), 1.0, 64)


def test_short_mean_is_close():
    """The error of the mean of 20 is below .002 of an update."""
    updates = np.random.default_rng(2).normal(size=(20, 20_000)).astype(np.float32)
    unit = unit_of(1.5 * float(np.linalg.norm(updates, axis=1).max()), 20_000, 64, SHORT_BITS)
    total = sum((short(u, unit, 64) for u in updates), np.zeros(20_000, np.uint32))
    mean = mean_of(total, 20, unit, 1000.0)
    assert np.linalg.norm(mean - updates.mean(0)) / np.linalg.norm(updates[0]) < 0.002
