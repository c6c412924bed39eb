"""Blocks of integers with a scale each."""

from __future__ import annotations

import numpy as np

from shoal.protocol.precision import blocks


def test_rounding_is_random_and_unbiased():
    vector = np.full(20_001, 0.25, np.float32)
    vector[0::256] = 127
    found = blocks.decode(memoryview(blocks.encode(vector, b"s")), 20_001)[vector < 1]
    assert set(found.tolist()) == {0.0, 1.0}
    assert abs(found.mean() - 0.25) < 0.02
