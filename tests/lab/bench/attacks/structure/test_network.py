"""The batched gradient equals the training of the fleet's own code."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.lab import ONE_STEP
from shoal_lab.bench.attacks.structure.network import Network

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("batch", [1, 7])
def test_updates_equal_real_training(lab, batch):
    """Also the zeros of dead units, which attacks read."""
    network = Network.of(lab)
    assert network.length == lab.length
    parts = [lab.pick(f"network {i}", batch) for i in range(4)]
    x, y = np.stack([p.x for p in parts]), np.stack([p.y for p in parts])
    made = network.updates(lab.origin, x, y)
    real = np.stack([lab.update(p, ONE_STEP) for p in parts])
    assert np.allclose(made, real, atol=1e-7)
    assert np.mean((made == 0) == (real == 0)) > 0.999


def test_the_unit_of_each_coordinate_is_the_one_that_it_feeds():
    """A unit that is dead for an image moves none of its coordinates; the output biases have no unit."""
    network = Network(pixels=5, hidden=3, classes=2)
    theta = network.origin(np.random.default_rng(0))
    w1, b1, *_ = network.split(theta)
    w1[:], b1[:] = 1, 1
    b1[1] = -100
    image, label = np.ones((1, 1, 5), np.float32), np.zeros((1, 1), np.int64)
    moved = network.updates(theta, image, label)[0] != 0
    assert set(network.unit[moved]) == {0, 2, 3}
    assert not moved[network.unit == 1].any()
    assert (network.unit == 3).sum() == 2


def test_the_origin_has_the_spread_of_the_real_one(lab):
    made = Network.of(lab).origin(np.random.default_rng(1))
    assert made.dtype == np.float32
    assert np.std(made) == pytest.approx(np.std(lab.origin), rel=0.05)
