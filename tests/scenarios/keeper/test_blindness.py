"""The aggregator's disk and one device's secrets: with a keeper they hold no vector near a single update."""

from __future__ import annotations

import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from shoal_lab.loopback.fleet import BROKER_URL

import aggregator.rounds.engine
import aggregator.sums
import edge_client.learning.update
from crypto.sums.looks import SKETCH
from shoal.simulation.process_fleet import Stage
from tests.helpers.cases import with_long
from tests.helpers.fleets import grouped_data, make_fleet, same_partition, truth_of
from tests.helpers.tasks import logistic_bundle

INPUTS, CLASSES, DEVICES = 2500, 4, 20
BEYOND = 0.02
"""By how much nearer to an update the attacker's vectors may come than the means of opened cells."""
RUNS = {
    "ifca": {"algorithm": "ifca", "settings": {"k": 2}, "rounds": 12},
    "ifca in 16 bits": {"algorithm": "ifca", "settings": {"k": 2}, "rounds": 6, "precision_up": "float16"},
    "cfl": {"algorithm": "cfl", "rounds": 16},
}


def nearest(updates, held):
    """Return the cosine of each update with its projection onto the span of the vectors that the attacker holds."""
    basis, _ = np.linalg.qr(np.stack(held, axis=1).astype(np.float64))
    return np.linalg.norm(basis.T @ np.stack(updates, axis=1), axis=0) / np.linalg.norm(updates, axis=1)


class Attacker:
    """What the aggregator's disk and memory hold of each round, under its rotation, which any device can undo.

    Attributes:
        updates: round -> masked updates, which no party but their devices has with a keeper.
        means: round -> means of opened cells.
        held: round -> all vectors: uploads, as numbers of each kind, opened sums and means, and what looks showed.
    """

    def __init__(self, monkeypatch):
        self.updates, self.means, self.held = (defaultdict(list) for _ in range(3))
        self._watch(monkeypatch, edge_client.learning.update, "_encoded", self._encoded)
        self._watch(monkeypatch, aggregator.rounds.engine, "agree", self._agree)
        self._watch(monkeypatch, aggregator.sums.CellOpener, "_opened", self._opened)
        self._watch(monkeypatch, aggregator.sums.CellOpener, "take", self._take)

    @staticmethod
    def _watch(monkeypatch, owner, name, see):
        true = getattr(owner, name)

        def watched(*arguments):
            found = true(*arguments)
            see(found, *arguments)
            return found

        monkeypatch.setattr(owner, name, watched)

    def _encoded(self, found, *arguments):
        self.updates[arguments[2].round].append(found[0].masked.astype(np.float64))

    def _agree(self, _, *arguments):
        for update in arguments[2]:
            if update.vector is None:
                continue
            row = update.row.copy()
            self._hold(update.round, row.view(np.int32), row.view(np.uint32), np.nan_to_num(row, posinf=0, neginf=0))
            self._hold_sketches(update.round, update.sketch)

    def _opened(self, found, *arguments):
        round_ = arguments[1]
        self.means[round_] += [one.mean for one in found.sums]
        self._hold(round_, *(one.mean for one in found.sums), *(one.words.view(np.int32) for one in found.sums))

    def _take(self, _, *arguments):
        told = arguments[1]
        self._hold_sketches(told.round, told.masked)

    def _hold_sketches(self, round_, data):
        """Hold rows of sketches, each at the coordinates that it has of an update."""
        words = np.frombuffer(data, "<i4")
        for row in words.reshape(-1, SKETCH) if len(words) % SKETCH == 0 else ():
            whole = np.zeros(len(self.updates[round_][0]))
            whole[np.arange(SKETCH) * len(whole) // SKETCH] = row
            self._hold(round_, whole)

    def _hold(self, round_, *vectors):
        self.held[round_] += [vector.astype(np.float64) for vector in vectors if np.any(vector)]

    def found(self):
        """Yield for each update of each round how near all vectors of the round come to it, and how near they should.

        That is as near as the means of opened cells and so many random vectors.
        """
        for round_, updates in self.updates.items():
            if held := self.held[round_]:
                means = self.means[round_]
                by_chance = np.sqrt((len(held) - len(means)) / len(updates[0]))
                of_means = nearest(updates, means) if means else np.zeros(len(updates))
                yield from zip(nearest(updates, held), np.hypot(of_means, by_chance), strict=True)


def spread(samples):
    """Return samples with their features turned into many, from which a few samples still teach a model."""
    few = samples.x.shape[1]
    turn = np.linalg.qr(np.random.default_rng(0).normal(size=(INPUTS, few)))[0]
    return dataclasses.replace(samples, x=(samples.x @ turn.T).astype(np.float32))


def run_of(tmp_path, keeper, algorithm):
    """Run a fleet of two groups to its end."""
    data = {name: spread(samples) for name, samples in grouped_data(DEVICES, 2).items()}
    stage = Stage(tmp_path / "stage", BROKER_URL, tuple(sorted(data)), keeper=keeper)
    options = {"mode": "rotation", "robust": "off", "weighting": "uniform", "min_contributors": 3, **RUNS[algorithm]}
    bundle = logistic_bundle(INPUTS, CLASSES)
    with make_fleet(tmp_path / "fleet", data, bundle=bundle, stage=stage, shards=1, **options) as fleet:
        fleet.run(1000)
        assert same_partition(fleet.records()[-1]["clusters"], truth_of(DEVICES, 2))
        return [event["kind"] for record in fleet.records() for event in record["events"]]


@pytest.mark.parametrize("algorithm", with_long(RUNS, "ifca in 16 bits", "cfl"))
def test_disk_and_a_device_show_no_update(tmp_path, monkeypatch, algorithm):
    attacker = Attacker(monkeypatch)
    events = run_of(tmp_path, "keeper", algorithm)
    assert ("look" in events) == (algorithm == "cfl")
    found = list(attacker.found())
    assert len(found) >= DEVICES * (RUNS[algorithm]["rounds"] - 2)
    assert max(near - expected for near, expected in found) < BEYOND


def test_without_a_keeper_they_show_each(tmp_path, monkeypatch):
    """The same search finds every update where there is something to find."""
    attacker = Attacker(monkeypatch)
    run_of(tmp_path, "", "ifca")
    assert all(near > 0.999 for near, _ in attacker.found())


@pytest.mark.parametrize("left", [1, 3])
def test_leaver_is_hidden_by_the_rule(left):
    """The difference of two sums is the update of one that left; with the rule it is of three, and no nearer than their mean."""
    rng = np.random.default_rng(0)
    updates = rng.normal(size=(10, 2000)) + 0.5 * rng.normal(size=2000)
    difference = updates.sum(0) - updates[left:].sum(0)
    cosine = nearest(updates[:1], [difference])[0]
    assert (cosine > 0.999) if left == 1 else (cosine < nearest(updates[:1], [updates[:3].mean(0)])[0] + BEYOND)
