"""The benchmark of the engine alone runs rounds of the engine."""

import json

import pytest
from shoal_lab.bench.load import engine as engine_load
from shoal_lab.bench.load.engine import FLEETS, measure_engine

from tests.helpers.cases import with_long

pytestmark = pytest.mark.torch


@pytest.mark.parametrize("algorithm", with_long(["fedavg", "cfl", "ifca"], "fedavg"))
def test_its_figures(monkeypatch, algorithm):
    monkeypatch.setattr(engine_load, "FLEETS", (3, 6))
    data = measure_engine(algorithm)
    assert json.loads(json.dumps(data)) == data
    assert [d["devices"] for d in data] == [3, 6]
    assert all(d["us_per_presence"] > 0 and d["us_per_upload"] > 0 for d in data)


def test_it_compares_a_small_fleet_with_a_large_one():
    assert FLEETS == (300, 10_000)
