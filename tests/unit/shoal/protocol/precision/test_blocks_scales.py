"""The range of scales."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.errors import IntegrityError, WireError
from shoal.protocol.precision.blocks import LEAST, MOST, checked, flushed


def test_scales_in_range_pass():
    scales = np.array([0, LEAST, 1, MOST], np.float32)
    assert checked(scales).tolist() == flushed(scales).tolist() == scales.tolist()


def test_small_scales_become_zero():
    assert flushed(np.array([LEAST / 2, 1e-45], np.float32)).tolist() == [0, 0]


def test_large_scales_are_refused_twice():
    """Large scales are refused on both sides."""
    large = np.array([MOST * 2], np.float32)
    with pytest.raises(IntegrityError):
        flushed(large)
    with pytest.raises(WireError):
        checked(large)
