"""The aggregator's disk and one device's secrets: with a keeper they hold no vector near a single update."""

from __future__ import annotations

import numpy as np
import pytest
from shoal_lab.loopback.fleet import BROKER_URL

import aggregator.rounds.engine
import aggregator.sums
import edge_client.learning.update
from shoal.simulation.process_fleet import Stage
from tests.helpers.fleets import grouped_data, make_fleet
from tests.helpers.tasks import logistic_bundle

INPUTS, CLASSES, DEVICES = 10_000, 4, 6
BEYOND = 0.02
"""By how much more the attacker's vectors may resemble an update than the mean of its cell does."""


def nearest(update, held):
    """Return the cosine between an update and its projection onto the span of the vectors that the attacker holds."""
    basis, _ = np.linalg.qr(np.stack(held, axis=1).astype(np.float64))
    return float(np.linalg.norm(basis.T @ update) / np.linalg.norm(update))


def shown(tmp_path, monkeypatch, keeper):
    """Return for each device how near the vectors of the aggregator come to its update, and how near the mean alone does.

    Both are compared under the round's rotation, which keeps cosines and which any device can undo.
    """
    made, means, words = [], [], []
    agree, encoded, mean_of = (
        aggregator.rounds.engine.agree,
        edge_client.learning.update._encoded,
        aggregator.sums.mean_of,
    )

    def close(held, offers, given, assignments):
        words[:] = words or [update.row.copy() for update in given]
        return agree(held, offers, given, assignments)

    def record(*arguments):
        found = encoded(*arguments)
        made.append(found[0])
        return found

    def opened(*arguments):
        means.append(mean_of(*arguments))
        return means[-1]

    monkeypatch.setattr(edge_client.learning.update, "_encoded", record)
    monkeypatch.setattr(aggregator.sums, "mean_of", opened)
    monkeypatch.setattr(aggregator.rounds.engine, "agree", close)
    data = grouped_data(DEVICES, inputs=INPUTS, classes=CLASSES)
    stage = Stage(tmp_path / "stage", BROKER_URL, tuple(sorted(data)), keeper=keeper)
    alike = {"mode": "rotation", "robust": "off", "weighting": "uniform", "min_contributors": 3}
    bundle = logistic_bundle(INPUTS, CLASSES)
    with make_fleet(tmp_path / "fleet", data, bundle=bundle, stage=stage, shards=1, **alike) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, 60)
    assert len(words) == DEVICES
    updates = [one.masked.astype(np.float64) for one in made[:DEVICES]]
    whole = [row.view(np.int32) for row in words] if keeper else words
    mean = np.mean(updates, axis=0)
    assert not keeper or np.allclose(means[0], mean, atol=1e-4)
    return [(nearest(u, [*whole, mean]), nearest(u, [mean])) for u in updates]


def test_disk_and_a_device_show_no_update(tmp_path, monkeypatch):
    for found, of_mean in shown(tmp_path, monkeypatch, "keeper"):
        assert found < of_mean + BEYOND


def test_without_a_keeper_they_show_each(tmp_path, monkeypatch):
    """The same search finds every update where there is something to find."""
    found = shown(tmp_path, monkeypatch, "")
    assert all(f > 0.999 for f, _ in found)


@pytest.mark.parametrize("left", [1, 3])
def test_leaver_is_hidden_by_the_rule(left):
    """The difference of two sums is the update of one that left; with the rule it is of three, and no nearer than their mean."""
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(10, 2000)) + 0.5 * rng.normal(size=2000)
    difference = updates.sum(0) - updates[left:].sum(0)
    cosine = nearest(updates[0], [difference])
    assert (cosine > 0.999) if left == 1 else (cosine < nearest(updates[0], [updates[:3].mean(0)]) + BEYOND)
