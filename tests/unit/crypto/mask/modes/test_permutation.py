"""The permutation of a vector."""

from __future__ import annotations

import numpy as np
import pytest

from crypto.mask.modes.permutation import Permutation


@pytest.mark.parametrize("length", [1, 5, 65_536, 300_000])
def test_it_gathers_and_undoes(length: int) -> None:
    """It gathers by the index, and undoes that; the longest is done in pieces."""
    rng = np.random.default_rng(length)
    index = rng.permutation(length).astype(np.int32)
    source = rng.standard_normal(length, dtype=np.float32)
    out = np.empty_like(source)
    back = np.empty_like(source)
    transform = Permutation(index)
    transform.apply(source, out)
    transform.invert(out, back)
    np.testing.assert_array_equal(out, source[index])
    np.testing.assert_array_equal(back, source)
    assert transform.length == length


def test_its_repr_holds_no_index() -> None:
    assert repr(Permutation(np.array([2, 0, 1], np.int32))) == "Permutation(length=3, index=<redacted>)"
