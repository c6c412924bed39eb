"""The quantiser of rotated vectors."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shoal.protocol.precision import rotated


def density(x):
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi) if math.isfinite(x) else 0.0


def mass(x):
    return (1 + math.erf(x / math.sqrt(2))) / 2


@pytest.mark.parametrize("bits", [2, 4])
def test_each_level_is_the_mean_of_its_cell_of_the_normal_distribution(bits):
    """Lloyd's condition: no other levels have a smaller mean squared error."""
    levels = rotated.levels(bits)
    bounds = [-math.inf, *((levels[1:] + levels[:-1]) / 2).astype(float), math.inf]
    for level, low, high in zip(levels, bounds, bounds[1:], strict=False):
        assert level == pytest.approx((density(low) - density(high)) / (mass(high) - mass(low)), abs=1e-6)
    assert len(levels) == 2**bits


@pytest.mark.parametrize("bits", [2, 4])
def test_a_spike_is_spread_before_it_is_quantised(bits):
    """Without the rotation a spike among zeros would lose its size."""
    vector = np.zeros(4096, np.float32)
    vector[17] = 1
    found = rotated.decode(memoryview(rotated.encode(vector, bits, b"s")), 4096, bits, b"s")
    assert found[17] == pytest.approx(1, abs=1e-3)


def test_another_seed_does_not_decode():
    vector = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    found = rotated.decode(memoryview(rotated.encode(vector, 4, b"s")), 4096, 4, b"t")
    assert abs(found @ vector) / (vector @ vector) < 0.1
