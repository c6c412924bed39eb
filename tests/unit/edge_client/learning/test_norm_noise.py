"""The norm noise factor: its mean, spread and bounds, and its independence of the seed that the aggregator knows."""

import math
import random
from types import SimpleNamespace

import pytest

from edge_client.learning.norm_noise import CLIP, SYSTEM, noise_factor
from shoal.limits import MAX_NORM_NOISE


def draws(blur, count=20_000, seed=3):
    source = random.Random(seed)
    return [noise_factor(blur, source) for _ in range(count)]


def test_no_blur_is_no_factor():
    assert noise_factor(0.0) == 1.0


@pytest.mark.parametrize("blur", [0.01, MAX_NORM_NOISE])
def test_mean_is_one_and_deviation_is_blur(blur):
    """To three standard errors of 20,000 draws."""
    found = draws(blur)
    mean = sum(found) / len(found)
    deviation = math.sqrt(sum((f - mean) ** 2 for f in found) / len(found))
    assert mean == pytest.approx(1.0, abs=3 * blur / math.sqrt(len(found)))
    assert deviation == pytest.approx(blur, rel=0.03)


@pytest.mark.parametrize("value", [-99.0, 99.0])
def test_factor_is_bounded_and_positive(value):
    """The factor is bounded and stays positive."""
    factor = noise_factor(MAX_NORM_NOISE, SimpleNamespace(normalvariate=lambda *_: value))
    assert factor == pytest.approx(1 + math.copysign(CLIP * MAX_NORM_NOISE, value))
    assert factor > 0.1


def test_device_draws_from_operating_system():
    """With a known seed the factor could be computed and removed."""
    assert isinstance(SYSTEM, random.SystemRandom)
    assert len({noise_factor(0.1) for _ in range(20)}) == 20
