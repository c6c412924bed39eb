"""The two layouts of a permutation, and the key stream that they are derived from."""

from __future__ import annotations

import numpy as np
import pytest

from crypto.mask.modes.permutation import (
    BLOCK,
    BLOCKED_FROM,
    BlockedPermutation,
    Permutation,
    from_index,
)
from crypto.mask.stream import keystream, permutation, signs, words

KEY = bytes(range(32))


@pytest.mark.parametrize("length", [1, 2, 3, 1023, 1024, 1025, 200_000])
def test_the_keyed_permutation_is_a_bijection(length: int) -> None:
    index = permutation(KEY, length)
    assert index.dtype == np.int64
    np.testing.assert_array_equal(np.sort(index), np.arange(length))


def test_words_do_not_depend_on_how_many_are_asked_for() -> None:
    """A longer stream starts with the shorter one, also across the 1 MiB pieces it is made in."""
    np.testing.assert_array_equal(words(KEY, 300_000)[:1000], words(KEY, 1000))


@pytest.mark.parametrize("length", [1, 7, 8, 9, 1000])
def test_signs_are_the_bits_of_the_keystream_lowest_first(length: int) -> None:
    stream = int.from_bytes(keystream(KEY, 200).tobytes(), "little")
    assert signs(KEY, length).tolist() == [-1 if stream >> i & 1 else 1 for i in range(length)]
    assert signs(KEY, length).dtype == np.int8


def test_half_of_the_signs_are_minus() -> None:
    """Of 100,000 signs the sum is within 6 standard deviations of zero, and neighbours agree as often as not."""
    drawn = signs(KEY, 100_000).astype(np.int64)
    assert abs(drawn.sum()) < 6 * 317
    assert abs((drawn[1:] * drawn[:-1]).sum()) < 6 * 317


def test_first_positions_are_uniform() -> None:
    """Over 4000 keys each of 8 indices comes first about 500 times (chi-square below the 1e-6 quantile of 7 dof)."""
    firsts = [permutation(i.to_bytes(32, "big"), 8)[0] for i in range(4000)]
    counts = np.bincount(firsts, minlength=8)
    assert ((counts - 500) ** 2 / 500).sum() < 43


@pytest.mark.parametrize("layout", [Permutation, BlockedPermutation])
@pytest.mark.parametrize("length", [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 300_000])
def test_both_layouts_gather_by_the_index_and_undo_it(
    layout: type[Permutation] | type[BlockedPermutation], length: int
) -> None:
    rng = np.random.default_rng(length)
    index = rng.permutation(length)
    source = rng.standard_normal(length, dtype=np.float32)
    out = np.empty_like(source)
    back = np.empty_like(source)
    transform = layout(index)
    transform.apply(source, out)
    transform.invert(out, back)
    np.testing.assert_array_equal(out, source[index])
    np.testing.assert_array_equal(back, source)
    assert transform.length == length


def test_the_layout_changes_with_the_length() -> None:
    assert isinstance(from_index(np.arange(100)), Permutation)
    assert isinstance(from_index(np.arange(BLOCKED_FROM)), BlockedPermutation)


def test_one_index_under_both_layouts_is_the_same_permutation() -> None:
    """A device's masked vector does not depend on the layout."""
    index = permutation(KEY, 3 * BLOCK + 5)
    source = np.random.default_rng(3).standard_normal(index.size, dtype=np.float32)
    outs = np.empty((2, index.size), dtype=np.float32)
    Permutation(index).apply(source, outs[0])
    BlockedPermutation(index).apply(source, outs[1])
    np.testing.assert_array_equal(outs[0], outs[1])


@pytest.mark.parametrize("index", [np.arange(200_000), np.arange(200_000)[::-1].copy()], ids=["identity", "reversal"])
def test_blocks_that_stay_together_leave_empty_runs(index: np.ndarray) -> None:
    source = np.arange(index.size, dtype=np.float32)
    out = np.empty_like(source)
    back = np.empty_like(source)
    transform = BlockedPermutation(index)
    transform.apply(source, out)
    transform.invert(out, back)
    np.testing.assert_array_equal(out, source[index])
    np.testing.assert_array_equal(back, source)


def test_reprs_hold_no_index() -> None:
    for transform in (Permutation(np.array([2, 0, 1])), BlockedPermutation(np.array([2, 0, 1]))):
        assert repr(transform).endswith("(length=3, index=<redacted>)")
