"""The simulated fleet applies a device's own checks, and its batched gradient equals the fleet's own training."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.lab import LIFETIMES, ONE_STEP
from shoal_lab.bench.attacks.structure.fleet import MaskedFleet, Network

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
    assert np.std(network.origin(np.random.default_rng(1))) == pytest.approx(np.std(lab.origin), rel=0.05)


@pytest.mark.parametrize("lifetime", LIFETIMES)
def test_uploads_are_masked_under_rounds_key(lab, lifetime):
    """Means add up under fresh keys and replace each other under one."""
    fleet, mean = MaskedFleet(lab, "permutation", lifetime, 5), np.full(lab.length, 0.01, np.float32)
    for round_ in (1, 2, 3):
        sent = fleet.uploads()
        assert fleet.round == round_
        assert np.array_equal(fleet.keys.unmasked(sent, round_), fleet.clear)
        fleet.announce(mean)
    assert np.allclose(fleet.held - fleet.origin, {"run": 1, "round": 3}[lifetime] * 0.01, atol=1e-6)
