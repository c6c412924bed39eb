"""Paths of coordinates over the rounds, and their matching."""

import numpy as np
from shoal_lab.bench.attacks import shadow_matching
from shoal_lab.bench.attacks.shadow_matching import closest, paths

RNG_SEED = 5


def normal(*shape, seed=RNG_SEED):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_paths_are_matched_with_any_signs():
    values = normal(6, 3, 40)
    flipped = values * np.where(np.arange(40) % 2, -1, 1).astype(np.float32)
    one = np.ones(6)
    assert np.array_equal(closest(paths(flipped, one, signed=False), paths(values, one, signed=False)), np.arange(40))
    assert not np.array_equal(closest(paths(flipped, one, signed=True), paths(values, one, signed=True)), np.arange(40))


def test_a_path_is_the_mean_over_the_devices_of_each_round_over_its_scale():
    values = np.array([[[1.0, -4.0], [3.0, -2.0]], [[10.0, 0.0], [30.0, 20.0]]], np.float32)
    scale = np.array([2.0, 10.0])
    assert paths(values, scale, signed=True).tolist() == [[1.0, 2.0], [-1.5, 1.0]]
    assert paths(values, scale, signed=False).tolist() == [[1.0, 2.0], [1.5, -1.0]]


def test_the_nearest_path_is_found_for_more_than_one_chunk(monkeypatch):
    monkeypatch.setattr(shadow_matching, "_CHUNK", 3)
    known = np.arange(10.0)[:, None] * np.ones(2)
    seen = known[::-1] + 0.4
    assert closest(seen, known).tolist() == list(range(9, -1, -1))
