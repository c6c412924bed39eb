"""`shoal bench aggregator` drives the daemon's own service, which closes rounds of all devices."""

import json

import pytest
from shoal_lab.bench.load import aggregator as aggregator_load
from shoal_lab.bench.load.aggregator import SIZES, Crowd, measure

from aggregator.storage.run_status import read_records
from tests.helpers.cases import with_long
from tests.helpers.trees import python

pytestmark = pytest.mark.torch
DEVICES = 12


@pytest.fixture(autouse=True)
def _compiled_once(compile_once, monkeypatch):
    monkeypatch.setattr(aggregator_load, "compile_task", compile_once)


@pytest.mark.parametrize("algorithm", with_long(["fedavg", "cfl", "ifca"], "cfl"))
def test_its_rounds_are_rounds(tmp_path, algorithm):
    crowd = Crowd(tmp_path, DEVICES, algorithm)
    crowd.take(crowd.presences())
    for round_ in (1, 2):
        assert crowd.announced().round == round_
        crowd.take(crowd.uploads())
    crowd.close()
    records = read_records(tmp_path / "server/run-000001")
    assert [(r["round"], r["contributed"]) for r in records] == [(1, DEVICES), (2, DEVICES)]


def test_its_figures(monkeypatch):
    monkeypatch.setattr(aggregator_load, "ROUNDS", 2)
    data = measure(DEVICES).data()
    assert json.loads(json.dumps(data)) == data
    assert data["devices"] == DEVICES
    assert data["update_bytes"] == 4 * 7850
    assert data["published_bytes_per_round"] > data["update_bytes"]
    assert data["cpu_seconds_per_round"] == pytest.approx(1e-3 * DEVICES * data["cpu_ms_per_upload"])


def test_the_help_names_the_sizes_that_it_takes_by_default():
    told = " ".join(python("from shoal.cli import main; main()", "bench", "aggregator", "--help").stdout.split())
    first, second, third = SIZES
    assert f"default: {first}, {second} and {third}." in told
