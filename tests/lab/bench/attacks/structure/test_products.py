"""Features of updates that every mask shows don't depend on the mask."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.structure.network import Network
from shoal_lab.bench.attacks.structure.products import describe, guess

pytestmark = pytest.mark.torch


def test_features_are_the_same_under_a_rotation():
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((20, 60)).astype(np.float32)
    turn = np.linalg.qr(rng.standard_normal((60, 60)))[0].astype(np.float32)
    assert np.allclose(describe(rows), describe(rows @ turn), atol=1e-4)
    assert not np.allclose(describe(rows), describe(rows[::-1]), atol=1e-2)


def test_guesses_are_images_and_near_the_mean(lab):
    network = Network.of(lab)
    own = lab.pick("guessed", 30)
    rows = network.updates(lab.origin, own.x[:, None], own.y[:, None])
    found = guess(lab, network, rows, 0.0)
    assert found.shape == (30, network.pixels)
    assert 0 <= found.min() <= found.max() <= 1
    assert np.abs(found.mean(0) - lab.public.mean()).mean() < 0.1
