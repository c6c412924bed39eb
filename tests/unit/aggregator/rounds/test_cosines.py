"""The sample of cosines in a round's record."""

import base64

import numpy as np
import pytest

from aggregator.rounds import closing
from aggregator.rounds.closing import MOST_DEVICES, sampled_cosines
from tests.helpers.plans import contribution


def values_of(found):
    n = len(found.devices)
    matrix = np.eye(n)
    matrix[np.triu_indices(n, 1)] = np.frombuffer(base64.b64decode(found.hundredths), np.int8) / 100
    return np.maximum(matrix, matrix.T) + np.minimum(matrix, matrix.T) - np.eye(n)


def test_cosines_follow_the_clusters():
    """Cosines are in hundredths and devices in order of their clusters."""
    given = [
        contribution("a", [1, 0]),
        contribution("b", [-2, 0]),
        contribution("c", [1, 1]),
        contribution("d", [0, 3]),
    ]
    found = sampled_cosines(given, {"a": 5, "b": 1, "c": 1})
    assert found.devices == ("b", "c", "a", "d")
    expected = [[1, -0.71, -1, 0], [-0.71, 1, 0.71, 0.71], [-1, 0.71, 1, 0], [0, 0.71, 0, 1]]
    assert values_of(found) == pytest.approx(np.array(expected), abs=1e-9)


def test_without_two_updates_there_are_none():
    assert sampled_cosines([], {}) is None
    assert sampled_cosines([contribution("a", [1, 0]), contribution("b")], {"a": 0}) is None


def test_large_fleet_is_sampled():
    """A large fleet is sampled from each cluster."""
    rng = np.random.default_rng(0)
    names = [f"d{i:03d}" for i in range(4 * MOST_DEVICES)]
    clusters = {n: i % 4 for i, n in enumerate(names)}
    found = sampled_cosines([contribution(n, rng.standard_normal(8)) for n in names], clusters)
    assert len(found.devices) == len(set(found.devices)) == MOST_DEVICES
    assert [sum(int(n[1:]) % 4 == c for n in found.devices) for c in range(4)] == [MOST_DEVICES // 4] * 4


def test_long_updates_are_compared_in_part(monkeypatch):
    """Long updates are compared on a part of their coordinates."""
    monkeypatch.setattr(closing, "MOST_COORDINATES", 512)
    rng = np.random.default_rng(1)
    shared = rng.standard_normal(20_000)
    given = [contribution(n, shared + rng.standard_normal(20_000)) for n in "ab"]
    assert values_of(sampled_cosines(given, {}))[0, 1] == pytest.approx(0.5, abs=0.12)
