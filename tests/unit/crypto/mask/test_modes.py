"""Effect of each mode on values, its memory, and its repr."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest

from crypto.mask.masking import mask
from crypto.mask.modes.registry import MODES
from tests.helpers.masks import key_of, normal

KEPT_BYTES = {"none": 0, "permutation": 4, "signed-permutation": 4.125, "rotation": 4.375}
"""A coordinate, in the key."""


def test_modes_have_their_own_permutations() -> None:
    """One round masked in two modes must not give the one away by the other."""
    ramp = np.arange(1, 1001, dtype=np.float32)
    plain, signed = (mask(ramp, key_of(mode, 1000)).values for mode in ("permutation", "signed-permutation"))
    assert np.count_nonzero(plain == np.abs(signed)) < 10


@pytest.mark.parametrize("mode", MODES)
def test_repeating_mask_gives_the_same_bits(mode: str) -> None:
    """A device that derives its key again after a crash uploads the same bytes."""
    vector = normal(20_011)
    assert mask(vector, key_of(mode, 20_011)).values.tobytes() == mask(vector, key_of(mode, 20_011)).values.tobytes()


@pytest.mark.parametrize("mode", MODES)
def test_memory_stays_as_documented(mode: str) -> None:
    """Bytes a coordinate: to derive, to keep, and beside input and output to mask and to unmask."""
    length, slack = 3_000_000, 5 << 20
    source, out = normal(length), np.empty(length, dtype=np.float32)
    tracemalloc.start()
    try:
        key = key_of(mode, length)
        kept, peak = tracemalloc.get_traced_memory()
        assert kept <= KEPT_BYTES[mode] * length + slack
        assert peak <= 10 * length + slack
        for go in (key.apply, key.invert):
            tracemalloc.reset_peak()
            go(source, out)
            assert tracemalloc.get_traced_memory()[1] - kept <= 4 * length + slack
    finally:
        tracemalloc.stop()
