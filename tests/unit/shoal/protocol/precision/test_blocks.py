"""Blocks of integers with a scale each.

The range of scales.

Streams of a public seed.
"""

from __future__ import annotations

import numpy as np
import pytest

from shoal.errors import IntegrityError, WireError
from shoal.protocol.precision import blocks
from shoal.protocol.precision.blocks import LEAST, MOST, WINDOW, checked, flushed, windows


def test_each_block_has_its_own_scale():
    """A coordinate is off by less than the scale of its block, however large other blocks are; the largest are exact."""
    vector = np.concatenate([np.full(256, 1000.0), np.linspace(-1e-3, 1e-3, 256)]).astype(np.float32)
    found = blocks.decode(memoryview(blocks.encode(vector, b"s")), 512)
    assert np.abs(found - vector)[256:].max() <= 1e-3 / 127 * 1.001
    vector = np.array([127.0, -127.0, 63.0, 0.0], np.float32)
    assert blocks.decode(memoryview(blocks.encode(vector, b"s")), 4).tolist() == [127, -127, 63, 0]


def test_rounding_is_random_and_unbiased():
    vector = np.full(20_001, 0.25, np.float32)
    vector[0::256] = 127
    found = blocks.decode(memoryview(blocks.encode(vector, b"s")), 20_001)[vector < 1]
    assert set(found.tolist()) == {0.0, 1.0}
    assert abs(found.mean() - 0.25) < 0.02


def test_scales_in_range_pass():
    """Small ones become zero, large ones are refused on both sides."""
    scales = np.array([0, LEAST, 1, MOST], np.float32)
    assert checked(scales).tolist() == flushed(scales).tolist() == scales.tolist()
    assert flushed(np.array([LEAST / 2, 1e-45], np.float32)).tolist() == [0, 0]
    large = np.array([MOST * 2], np.float32)
    with pytest.raises(IntegrityError):
        flushed(large)
    with pytest.raises(WireError):
        checked(large)


def test_windows_cover_the_vector_once():
    spans = list(windows(2 * WINDOW + 5))
    assert [(s.start, s.stop) for s in spans] == [(0, WINDOW), (WINDOW, 2 * WINDOW), (2 * WINDOW, 2 * WINDOW + 5)]
    assert list(windows(0)) == []
