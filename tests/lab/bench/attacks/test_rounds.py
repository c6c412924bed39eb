"""Runs of several rounds: the fleet's, the attacker's imitation, and the masked form."""

import numpy as np
import pytest
from shoal_lab.bench.attacks import rounds
from shoal_lab.bench.attacks.lab import ONE_EPOCH
from shoal_lab.bench.attacks.rounds import fleet_run, masked_run, shadow_run

pytestmark = pytest.mark.torch


@pytest.fixture
def short(lab, monkeypatch):
    """Return the lab with an empty cache, for runs of three rounds of two devices; the cache is restored afterwards."""
    monkeypatch.setattr(rounds, "ROUNDS", 3)
    monkeypatch.setattr(rounds, "DEVICES", 2)
    cached = dict(lab._cache)
    lab._cache.clear()
    yield lab
    lab._cache.clear()
    lab._cache.update(cached)


def test_every_round_starts_from_the_mean_of_the_one_before(short):
    found = fleet_run(short)
    assert found.shape == (3, 2, short.length)
    theta = short.origin + found[0].mean(0) + found[1].mean(0)
    batch = short.pick("fleet 1", rounds.SAMPLES)
    np.testing.assert_array_equal(found[2, 1], short.update(batch, ONE_EPOCH, theta=theta, seed=2001))


def test_the_imitation_starts_alike_and_has_the_attackers_own_data(short):
    own = short.pick("shadow 0", rounds.SAMPLES, short.public)
    np.testing.assert_array_equal(shadow_run(short)[0, 0], short.update(own, ONE_EPOCH, seed=0))
    assert not np.array_equal(shadow_run(short), fleet_run(short))


@pytest.mark.parametrize("mode", ["permutation", "rotation"])
def test_all_rounds_are_masked_under_one_key(short, mode):
    seen = masked_run(short, mode)
    assert seen.shape == fleet_run(short).shape
    for t in range(3):
        np.testing.assert_array_equal(seen[t, 1], short.masked(fleet_run(short)[t, 1], mode))


def test_runs_are_made_once_and_masked_ones_forgotten_with_their_mode(short):
    assert fleet_run(short) is fleet_run(short)
    assert shadow_run(short) is shadow_run(short)
    first = masked_run(short, "rotation")
    assert masked_run(short, "rotation") is first
    short.forget("rotation")
    assert masked_run(short, "rotation") is not first
