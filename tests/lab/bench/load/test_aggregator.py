"""`shoal bench aggregator` drives the daemon's own service, which closes rounds of all devices, and the engine alone."""

import json

import pytest
from shoal_lab.bench.load import aggregator, fleet_load

from tests.helpers.cases import with_long

pytestmark = pytest.mark.torch
DEVICES = 12


@pytest.mark.parametrize("algorithm", with_long(["fedavg", "cfl", "ifca"], "cfl"))
def test_figures(compile_once, monkeypatch, algorithm):
    """A round that did not close would be an error."""
    monkeypatch.setattr(fleet_load, "compile_task", compile_once)
    monkeypatch.setattr(aggregator, "ROUNDS", 2)
    monkeypatch.setattr(aggregator, "ENGINE_SIZES", (3, 6))
    data = aggregator.measure((DEVICES,), algorithm)
    assert json.loads(json.dumps(data)) == data
    (load,) = data["loads"]
    assert (load["devices"], load["algorithm"], load["update_bytes"]) == (DEVICES, algorithm, 4 * 7850)
    assert load["published_bytes_per_round"] > load["update_bytes"]
    assert load["cpu_seconds_per_round"] == pytest.approx(1e-3 * DEVICES * load["cpu_ms_per_upload"])
    assert [d["devices"] for d in data["engine"]] == [3, 6]
    assert all(d["us_per_presence"] > 0 and d["us_per_upload"] > 0 for d in data["engine"])
