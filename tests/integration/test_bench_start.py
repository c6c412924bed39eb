"""`shoal bench start` on a real broker with real processes."""

from __future__ import annotations

import shutil

import pytest

pytest.importorskip("torch")

from shoal_lab.bench.starts import measure

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("mosquitto") is None, reason="mosquitto is not on PATH"),
]


@pytest.mark.long
def test_it_times_a_first_start_and_another():
    data = measure(1, "mosquitto")
    assert (data["starts"], data["broker"]) == (1, "mosquitto")
    assert data["seconds_first"] == [data["seconds_first_median"]]
    for kind in ("first", "again"):
        assert data[f"cpu_seconds_to_loss_{kind}_median"] > 0
        assert 0 < data[f"seconds_to_loss_{kind}_median"] < data[f"seconds_{kind}_median"] < 60
