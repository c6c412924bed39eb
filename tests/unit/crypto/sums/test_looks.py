"""Sketches of updates."""

import numpy as np
import pytest

from crypto.sums.looks import LENGTH, SKETCH, sketch


@pytest.mark.parametrize("length", [1, 511, 512, 513, 100_000])
def test_sketch_has_one_length(length):
    words = sketch(np.random.default_rng(1).normal(size=length).astype(np.float32)).view(np.int32)
    assert len(words) == SKETCH
    assert np.linalg.norm(words.astype(np.float64)) == pytest.approx(LENGTH, rel=2e-3)
    assert np.count_nonzero(words) <= length


def test_no_update_has_a_zero_sketch():
    assert not sketch(np.zeros(700, np.float32)).any()
