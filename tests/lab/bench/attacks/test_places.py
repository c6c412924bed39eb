"""Where masked coordinates belong: runs of several rounds, features of a coordinate, paths, and known pairs."""

import numpy as np
import pytest
from shoal_lab.bench.attacks import places
from shoal_lab.bench.attacks.lab import ONE_EPOCH
from shoal_lab.bench.attacks.places import (
    fleet_run,
    masked_run,
    read_map,
    shadow_run,
    undo,
)


def normal(*shape, seed=5):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture
def short(lab, monkeypatch):
    """Return the lab with an empty cache, for runs of three rounds of two devices; the cache is restored afterwards."""
    monkeypatch.setattr(places, "ROUNDS", 3)
    monkeypatch.setattr(places, "DEVICES", 2)
    cached = dict(lab._cache)
    lab._cache.clear()
    yield lab
    lab._cache.clear()
    lab._cache.update(cached)


@pytest.mark.torch
def test_runs_of_fleet_and_attacker(short):
    """A round starts from the mean of the one before; the imitation starts alike, with the attacker's own data."""
    found = fleet_run(short)
    assert found.shape == (3, 2, short.length)
    theta = short.origin + found[0].mean(0) + found[1].mean(0)
    batch = short.pick("fleet 1", places.SAMPLES)
    np.testing.assert_array_equal(found[2, 1], short.update(batch, ONE_EPOCH, theta=theta, seed=2001))
    own = short.pick("shadow 0", places.SAMPLES, short.public)
    np.testing.assert_array_equal(shadow_run(short)[0, 0], short.update(own, ONE_EPOCH, seed=0))


@pytest.mark.torch
def test_all_rounds_are_masked_under_one_key(short):
    """Made once, and forgotten with their mode."""
    seen = masked_run(short, "rotation")
    for t in range(3):
        np.testing.assert_array_equal(seen[t, 1], short.masked(fleet_run(short)[t, 1], "rotation"))
    assert masked_run(short, "rotation") is seen
    short.forget("rotation")
    assert masked_run(short, "rotation") is not seen


@pytest.mark.parametrize("flip", [False, True])
def test_map_is_read_from_pair_and_undoes_it(flip):
    """With signs and without, on a permutation made here; ranks are matched, so that rounding does no harm."""
    rng = np.random.default_rng(5)
    clear, other, order = normal(300), normal(300, seed=6), rng.permutation(300)
    sign = np.where(rng.random(300) < 0.5, -1, 1).astype(np.float32) if flip else np.ones(300, np.float32)
    rounded = clear * np.float32(1 + 1e-6)
    found, signs = read_map(clear, (rounded * sign)[order], "magnitudes" if flip else "values")
    assert np.array_equal(found, order)
    assert np.array_equal(undo((other * sign)[order], found, signs), other)
