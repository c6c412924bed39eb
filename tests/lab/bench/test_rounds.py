"""The benchmark of a warm round: its figures, its samples, and the time that bounds it."""

from __future__ import annotations

import types

import numpy as np
import pytest

pytest.importorskip("torch")

from shoal_lab.bench import rounds
from shoal_lab.bench.rounds import LOCAL, SAMPLES, TRAININGS, RoundFigures

from shoal.errors import ConfigError
from tests.helpers.tasks import logistic_bundle

pytestmark = pytest.mark.torch


def test_the_round_benchmark_says_its_mode():
    """As every report does."""
    figures = RoundFigures(
        seconds=(0.1, 0.2, 0.3),
        training_s=0.01,
        cores=2,
        devices=10,
        model_bytes=636_040,
        broker="mosquitto",
        mode="permutation",
        device_rss_mb_max=80.0,
        aggregator_rss_mb_max=300.0,
    )
    assert figures.data()["mode"] == "permutation"
    assert figures.data()["seconds_per_round_median"] == 0.2
    assert figures.data()["seconds_bound_by_training"] == pytest.approx(0.05)
    assert figures.data()["bound_ratio"] == pytest.approx(4.0)


def test_an_unknown_mode_is_refused_before_anything_starts():
    with pytest.raises(ConfigError, match="mask mode 'rot13' is not known"):
        rounds.measure(2, "no such broker", mode="rot13")


def test_more_cores_than_devices_do_not_shorten_a_training() -> None:
    figures = RoundFigures(
        seconds=(0.1,),
        training_s=0.01,
        cores=64,
        devices=10,
        model_bytes=636_040,
        broker="mosquitto",
        mode="permutation",
        device_rss_mb_max=80.0,
        aggregator_rss_mb_max=300.0,
    )
    assert figures.bound_s == pytest.approx(0.01)


def test_the_bound_spreads_the_trainings_over_the_cores():
    figures = RoundFigures(
        seconds=(0.3,),
        training_s=0.02,
        cores=4,
        devices=10,
        model_bytes=1,
        broker="amqtt",
        mode="none",
        device_rss_mb_max=1.0,
        aggregator_rss_mb_max=1.0,
    )
    assert figures.bound_s == pytest.approx(0.05)
    assert figures.data()["bound_ratio"] == pytest.approx(6.0)


def test_the_samples_are_those_of_mnist_in_shape_and_differ_between_devices(tmp_path):
    one, again, other = (np.load(rounds.write_data(tmp_path / f"{i}.npz", seed)) for i, seed in enumerate((1, 1, 2)))
    with one, again, other:
        x, y = one["x"], one["y"]
        assert (x.shape, x.dtype, y.shape) == ((SAMPLES, 784), np.float32, (SAMPLES,))
        assert 0.0 <= x.min() < x.max() <= 1.0
        assert set(np.unique(y)) == set(range(10))
        np.testing.assert_array_equal(x, again["x"])
        assert not np.array_equal(x, other["x"])


def test_the_bound_is_the_median_of_trainings_after_a_first_one_that_does_not_count(tmp_path, monkeypatch):
    """The first loads the graph; each begins at the same parameters, with the samples of the training share."""
    took = [100.0, *range(1, TRAININGS + 1)]
    clock = iter(t for end in np.cumsum(took) for t in (end - took[list(np.cumsum(took)).index(end)], end))
    calls = []

    def train(theta, batch, local, _backend, _rng, number, _cancelled):
        calls.append((theta.tobytes(), len(batch.y), local, number))

    monkeypatch.setattr(rounds, "train", train)
    monkeypatch.setattr(rounds, "time", types.SimpleNamespace(thread_time=lambda: next(clock)))
    theta = np.ones(7850, np.float32)
    source = rounds.write_data(tmp_path / "d.npz", 0)
    assert rounds.training_seconds(logistic_bundle(784, 10), theta, source) == pytest.approx((TRAININGS + 1) / 2)
    assert len(calls) == TRAININGS + 1
    assert {(begin, count, local) for begin, count, local, _ in calls} == {(theta.tobytes(), 600, LOCAL)}
