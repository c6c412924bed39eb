"""`shoal bench round` and `start` on a real broker with real processes: their reports match their measurements."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("torch")

from shoal_lab.bench import rounds
from shoal_lab.bench.starts import measure

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("mosquitto") is None, reason="mosquitto is not on PATH"),
]
MODEL_BYTES = 4 * (784 * 200 + 200 + 200 * 10 + 10)


@pytest.mark.long
def test_rounds_and_their_bounds_are_timed(compile_once, monkeypatch):
    """It times rounds and what bounds them."""
    monkeypatch.setattr(rounds, "compile_task", compile_once)
    data = rounds.measure(2, "mosquitto", rounds=3, mode="permutation")
    assert (data["devices"], data["rounds"], data["broker"], data["mode"]) == (2, 3, "mosquitto", "permutation")
    assert data["model_bytes"] == MODEL_BYTES
    assert data["seconds_per_round_min"] <= data["seconds_per_round_median"] <= data["seconds_per_round_max"]
    assert data["seconds_per_round_min"] > data["seconds_bound_by_training"] > 0
    assert data["device_rss_mb_max"] > 1


@pytest.mark.long
def test_it_times_a_first_start_and_another():
    data = measure(1)
    assert (data["starts"], data["broker"]) == (1, "mosquitto")
    assert data["seconds_first"] == [data["seconds_first_median"]]
    for kind in ("first", "again"):
        assert data[f"cpu_seconds_to_loss_{kind}_median"] > 0
        assert 0 < data[f"seconds_to_loss_{kind}_median"] < data[f"seconds_{kind}_median"] < 60
