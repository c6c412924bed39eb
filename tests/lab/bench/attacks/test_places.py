"""Where masked coordinates belong: runs of several rounds, features of a coordinate, paths, and known pairs."""

import numpy as np
import pytest
from shoal_lab.bench.attacks import places
from shoal_lab.bench.attacks.lab import ONE_EPOCH
from shoal_lab.bench.attacks.places import (
    closest,
    features,
    fleet_run,
    masked_run,
    paths,
    project,
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


def test_features_by_hand():
    """One coordinate, two rounds of two devices: 1, 3 and -2, 0; one that never moved has finite features."""
    (found,) = features(np.array([[[1.0], [3.0]], [[-2.0], [0.0]]], np.float32))
    sizes, spread = 1.5, np.std([1, 3, -2, 0])
    expected = [np.log(sizes), np.log(3), np.log(1.5), 0.25, np.log(sizes / spread), np.log(2), np.log(1)]
    np.testing.assert_allclose(found, expected, atol=1e-9)
    assert np.isfinite(features(np.zeros((1, 2, 3), np.float32))).all()


def test_paths_are_matched_with_any_signs(monkeypatch):
    monkeypatch.setattr(places, "_CHUNK", 7)
    values, one = normal(6, 3, 40), np.ones(6)
    flipped = values * np.where(np.arange(40) % 2, -1, 1).astype(np.float32)
    assert np.array_equal(closest(paths(flipped, one, signed=False), paths(values, one, signed=False)), np.arange(40))
    assert not np.array_equal(closest(paths(flipped, one, signed=True), paths(values, one, signed=True)), np.arange(40))


def test_projection_gives_part_in_the_span():
    known = [normal(50, seed=s) for s in (1, 2)]
    turn = np.linalg.qr(normal(50, 50).astype(float))[0].astype(np.float32)
    masked = [turn @ k for k in known]
    inside = 2 * known[0] - known[1]
    assert np.allclose(project(known, masked, turn @ inside), inside, atol=1e-4)
    outside = normal(50, seed=9).astype(float)
    for axis in np.linalg.qr(np.stack(known).T.astype(float))[0].T:
        outside -= (outside @ axis) * axis
    assert np.linalg.norm(project(known, masked, (turn @ outside).astype(np.float32))) < 1e-3


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
