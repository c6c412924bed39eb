"""The two layouts of a permutation."""

from __future__ import annotations

import numpy as np
import pytest

from crypto.mask.modes.permutation import (
    BLOCK,
    BlockedPermutation,
    Permutation,
)
from crypto.mask.stream import permutation

KEY = bytes(range(32))


@pytest.mark.parametrize("layout", [Permutation, BlockedPermutation])
@pytest.mark.parametrize("length", [1, 5, BLOCK, BLOCK + 1, 3 * BLOCK + 17, 300_000])
def test_both_layouts_gather_and_undo(layout: type[Permutation] | type[BlockedPermutation], length: int) -> None:
    """Both layouts gather by the index and undo it."""
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


def test_one_index_is_one_permutation() -> None:
    """A device's masked vector does not depend on the layout."""
    index = permutation(KEY, 3 * BLOCK + 5)
    source = np.random.default_rng(3).standard_normal(index.size, dtype=np.float32)
    outs = np.empty((2, index.size), dtype=np.float32)
    Permutation(index).apply(source, outs[0])
    BlockedPermutation(index).apply(source, outs[1])
    np.testing.assert_array_equal(outs[0], outs[1])


@pytest.mark.parametrize("index", [np.arange(200_000), np.arange(200_000)[::-1].copy()], ids=["identity", "reversal"])
def test_blocks_kept_together_leave_runs(index: np.ndarray) -> None:
    """Blocks that stay together leave empty runs."""
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
