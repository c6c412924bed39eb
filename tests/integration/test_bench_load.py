"""`shoal bench load` and `shoal bench soak` at small sizes: real broker, real daemon, real device runtimes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

pytest.importorskip("torch")

from shoal_lab.bench.load import fleet_load, soak
from shoal_lab.bench.load.fleet_load import LoadFleet
from shoal_lab.bench.load.measurement import measure

from tests.helpers.trees import python

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.torch,
    pytest.mark.skipif(shutil.which("mosquitto") is None, reason="mosquitto is not on PATH"),
]
FIELDS = [
    "devices",
    "model_bytes",
    "algorithm",
    "rounds",
    "seconds_per_round_median",
    "aggregator_cpu_ms_per_upload",
    "main_thread_cpu_ms_per_upload",
    "others_cpu_share",
    "broker_cpu_s_per_round",
    "aggregator_rss_mb_max",
    "open_files_max",
    "uploads_expected",
    "uploads_counted",
    "nacks",
    "reminders",
    "shards",
    "shard_rss_mb_max",
    "shards_cpu_ms_per_upload",
    "shard_cpu_ms_per_upload_max",
    "uploads_per_s_by_cpu",
    "core_each",
    "coordinator_vector_bytes",
]
DEVICES = 12
ROUNDS = 2
FAULT_DEVICES = 20
SPREAD_S = 3.0


@pytest.fixture(autouse=True)
def _compiled_once(compile_once, monkeypatch):
    monkeypatch.setattr(fleet_load, "compile_task", compile_once)


def bench_load(*arguments):
    """Run the command and return its data."""
    options = ("--devices", str(DEVICES), "--rounds", str(ROUNDS), "--json", *arguments)
    done = python("from shoal.cli import main; main()", "bench", "load", *options, timeout=170)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["schema"], answer["ok"]) == (1, True)
    return answer["data"]


@pytest.mark.long
@pytest.mark.parametrize("options", [pytest.param((), id="devices"), pytest.param(("--prepared",), id="prepared")])
def test_every_upload_is_counted_once(options):
    """Every upload of every device is counted once."""
    data = bench_load(*options)
    assert [name for name in data if name != "uploads_per_s_median"] == FIELDS
    assert ("uploads_per_s_median" in data) == ("--prepared" in options)
    assert (data["devices"], data["algorithm"], data["rounds"]) == (DEVICES, "fedavg", ROUNDS)
    assert data["model_bytes"] == 31_400
    assert data["uploads_expected"] == DEVICES * (ROUNDS + 1)
    assert data["uploads_counted"] == data["uploads_expected"]
    assert data["nacks"] == 0
    assert data["seconds_per_round_median"] > 0
    assert data["aggregator_cpu_ms_per_upload"] >= 0  # the system counts in steps of 10 ms: 0 if the round took less
    assert data["aggregator_rss_mb_max"] > 10
    assert 5 < data["open_files_max"] < 100


@pytest.mark.long
@pytest.mark.parametrize("prepared", [False, True], ids=["devices", "prepared"])
@pytest.mark.parametrize(("algorithm", "model"), [("ifca", "mlp"), ("cfl", "logistic")])
def test_other_algorithms_and_models_run_too(algorithm, model, prepared):
    data = measure(6, model=model, algorithm=algorithm, rounds=2, prepared=prepared)
    assert data["model_bytes"] == {"logistic": 31_400, "mlp": 636_040}[model]
    assert data["uploads_counted"] == data["uploads_expected"] == 6 * 3


@pytest.mark.long
@pytest.mark.parametrize("shards", [2, 3])
def test_prepared_parts_are_counted_once(shards):
    """Prepared parts are counted once and the coordinator stores none."""
    found = measure(6, rounds=2, prepared=True, shards=shards, core_each=True)
    assert found["uploads_counted"] == found["uploads_expected"] == 6 * 3
    assert found["shards"] == shards
    assert found["coordinator_vector_bytes"] == 0


def test_limit_on_open_files_is_aggregators():
    with LoadFleet(devices=1, open_files=77) as fleet:
        limits = Path(f"/proc/{fleet.start_aggregator().pid}/limits").read_text()
    (line,) = [x for x in limits.splitlines() if x.startswith("Max open files")]
    assert line.split()[3:5] == ["77", "77"]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", ["aggregator", "broker"])
def test_kill_in_mid_round_costs_no_upload(fault):
    """A process killed in the middle of a round costs no upload."""
    found = measure(FAULT_DEVICES, rounds=3, fault=fault, spread_s=SPREAD_S)
    assert found["uploads_counted"] == found["uploads_expected"] == FAULT_DEVICES * 4


@pytest.mark.long
@pytest.mark.timeout(300)
def test_rounds_close_though_devices_leave():
    """Every round closes though devices leave and return in each."""
    found = measure(FAULT_DEVICES, rounds=4, churn=0.1)
    assert found["churn"] == 0.1
    assert found["uploads_fewest"] >= 0.8 * FAULT_DEVICES
    assert found["out_of_step"] == 0


@pytest.mark.long
def test_short_soak_has_samples(tmp_path):
    """A short soak has samples in both thirds and a figure."""
    data = soak.measure(4, 0.05)
    assert len(data["samples"]) >= 4
    assert data["rounds"] > 0
    assert set(data["flat"]) == set(data["first_third"]) == set(data["last_third"])
    assert json.loads(json.dumps(data)) == data
    soak.plot([data], tmp_path / "soak.svg")
    assert (tmp_path / "soak.svg").read_bytes().count(b'id="axes_') == 5
