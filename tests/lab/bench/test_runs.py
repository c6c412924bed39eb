"""`shoal bench round` and `start`: the time that bounds a round, samples, and a device's start on a fleet that is made up."""

from __future__ import annotations

import types

import numpy as np
import pytest

pytest.importorskip("torch")

from shoal_lab.bench import rounds, starts
from shoal_lab.bench.rounds import LOCAL, SAMPLES, TRAININGS

from edge_client.learning.training import FIRST_STEP
from shoal.simulation.process_fleet import StageError
from tests.helpers.tasks import logistic_bundle

pytestmark = pytest.mark.torch


@pytest.mark.parametrize(("cores", "bound_s"), [(2, 0.05), (10, 0.01), (64, 0.01)])
def test_bound_spreads_trainings_over_cores(cores, bound_s):
    """More cores than devices do not shorten a training."""
    found = rounds.figures([0.1, 0.2, 0.3], 0.01, 10, cores)
    assert found["seconds_bound_by_training"] == pytest.approx(bound_s)
    assert found["bound_ratio"] == pytest.approx(0.2 / bound_s)


def test_samples_are_those_of_mnist_in_shape(tmp_path):
    """They differ between devices."""
    one, again, other = (np.load(rounds.write_data(tmp_path / f"{i}.npz", seed)) for i, seed in enumerate((1, 1, 2)))
    with one, again, other:
        x, y = one["x"], one["y"]
        assert (x.shape, x.dtype, y.shape) == ((SAMPLES, 784), np.float32, (SAMPLES,))
        assert 0.0 <= x.min() < x.max() <= 1.0
        assert set(np.unique(y)) == set(range(10))
        np.testing.assert_array_equal(x, again["x"])
        assert not np.array_equal(x, other["x"])


def test_the_bound_is_a_median_of_trainings(tmp_path, monkeypatch):
    """The first one loads the graph and does not count; each begins at the same parameters, with the training share."""
    ends = np.cumsum([100.0, *range(1, TRAININGS + 1)])
    clock = iter(np.column_stack([np.concatenate([[0], ends[:-1]]), ends]).ravel())
    calls = []
    monkeypatch.setattr(rounds, "train", lambda theta, batch, local, *_: calls.append((theta[0], len(batch.y), local)))
    monkeypatch.setattr(rounds, "time", types.SimpleNamespace(thread_time=lambda: next(clock)))
    source = rounds.write_data(tmp_path / "d.npz", 0)
    found = rounds.training_seconds(logistic_bundle(784, 10), np.ones(7850, np.float32), source)
    assert found == pytest.approx((TRAININGS + 1) / 2)
    assert calls == [(1.0, 600, LOCAL)] * (TRAININGS + 1)


class FakeStage:
    """A fleet in which a device that is started logs its first loss, and closes a round at the third look, or neither."""

    def __init__(self, folder, *, loss=True, update=True):
        self.looks, self.loss, self.update = 0, loss, update
        self.log = folder / "log"
        self.log.write_text(f"{FIRST_STEP} of an earlier start\n")

    def log_of(self, _name):
        return self.log

    def closed(self, _run):
        self.looks += 1
        return 1 if self.looks > 3 and self.update else 0

    def start_device(self, *_arguments):
        if self.loss:
            self.log.write_text(f"{self.log.read_text()}{FIRST_STEP}\n")
        return types.SimpleNamespace(cpu_s=lambda: 0.25, tail=lambda: "its last words")


@pytest.mark.parametrize(("missing", "words"), [("loss", "no loss was logged"), ("update", "no round was closed")])
def test_a_start_ends_with_a_closed_round(monkeypatch, tmp_path, missing, words):
    """A device that does nothing is an error with its log."""
    monkeypatch.setattr(starts, "SETTLE_S", 0.0)
    update_s, loss_s, loss_cpu_s = starts._start(FakeStage(tmp_path), 1, tmp_path)
    assert 0 < loss_s <= update_s < starts.WITHIN_S
    assert loss_cpu_s == 0.25
    monkeypatch.setattr(starts, "WITHIN_S", 0.0)
    with pytest.raises(StageError, match=f"(?s){words}.*its last words"):
        starts._start(FakeStage(tmp_path, **{missing: False}), 1, tmp_path)
