"""Samples in chunks: as many at a time as a forward pass takes, in order."""

import numpy as np
import pytest

from edge_client.learning.executor.base import SCORE_ROWS, in_chunks


@pytest.mark.parametrize(("n", "sizes"), [(1, [1]), (SCORE_ROWS, [100]), (2 * SCORE_ROWS + 1, [100, 100, 1])])
def test_chunks_are_computed_in_order(n, sizes):
    seen = []

    def compute(x):
        seen.append(len(x))
        return x + np.float32(1)

    x = np.arange(n, dtype=np.float32).reshape(n, 1)
    assert np.array_equal(in_chunks(compute, x), x + 1)
    assert seen == sizes
