"""`shoal bench round --beside flower`: with fake processes instead of Flower's, and its training beside torch's."""

from __future__ import annotations

import os
import shutil
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("torch")

from shoal_lab.bench import beside, rounds
from shoal_lab.bench.flower_fleet import train_numpy, train_torch

from shoal.simulation.process_fleet import StageError

pytestmark = pytest.mark.torch
COST = {"derive_ms": 1.0, "apply_ms": 2.0, "invert_ms": 3.0, "bytes": 1e6}
PEER = """
import json, os, socket, sys, time
told = json.loads(sys.argv[1])
if "rounds" in told:
    time.sleep(0.2)
    listening = socket.create_server(("127.0.0.1", int(told["address"].partition(":")[2])))
else:
    socket.create_connection(("127.0.0.1", int(told["address"].partition(":")[2])))
assert told["batch"] == 50 and os.environ["FLWR_TELEMETRY_ENABLED"] == "0"
with open("/dev/null" if "data" in told else told["place"], "wb") as file:
    for _ in range(told.get("rounds", 0)):
        file.write(bytes(4096))
        os.fsync(file.fileno())
        time.sleep(0.02)
        print(told["over"], flush=True)
if "rounds" in told and told["devices"] == 1:
    sys.exit("no more")
time.sleep(60)
"""


@contextmanager
def fake(folder, devices, monkeypatch):
    """A fleet whose server syncs a file once a round of 20 ms; with one device it ends early."""
    monkeypatch.setattr(rounds, "LOCAL", SimpleNamespace(batch_size=50, lr=0.1))
    program = folder / "peer.py"
    program.write_text(PEER.replace('told["place"]', repr(str(folder / "disk"))))
    data = [folder / f"data-{i}.npz" for i in range(devices)]
    count = rounds.WARM_UP_ROUNDS + (10 if devices == 1 else 2000)  # it does not wait for its clients, as Flower does
    with beside.flower([sys.executable, str(program)], "numpy", data, count) as running:
        yield running


def test_a_fleet_of_flower_is_watched(tmp_path, monkeypatch):
    """Its processes end with the block."""
    stages = []

    @contextmanager
    def started():
        with fake(tmp_path, 2, monkeypatch) as running:
            stages.append(dict(running[0].programs))
            yield running

    found = beside.watch(started, 5)
    assert found.keys() == {name for name in beside.FIGURES if name != "syncs"} - set(
        () if os.geteuid() == 0 else ("written_bytes",)
    )
    assert 15 < found["wall_ms"] < 2000
    assert found["cpu_ms"] >= found["cpu_ms_devices"] >= 0
    assert min(found["device_peak_mb"], found["server_peak_mb"]) > 1
    assert stages[0].keys() == {"aggregator", "data-0", "data-1"}
    assert all(program.process.poll() is not None for program in stages[0].values())


def test_an_ended_process_is_an_error(tmp_path, monkeypatch):
    """With its log."""
    with pytest.raises(StageError, match=r"(?s)aggregator ended with status 1:.*no more"):
        beside.watch(lambda: fake(tmp_path, 1, monkeypatch), 100)


@pytest.mark.skipif(shutil.which("strace") is None or os.geteuid() != 0, reason="strace may not trace here")
def test_syncs_are_counted(tmp_path, monkeypatch):
    """One a round; at the ends of the window one more or less."""
    found = beside.count_syncs(lambda: fake(tmp_path, 2, monkeypatch), 5, tmp_path / "calls")
    assert found == pytest.approx(1.0, abs=0.4)


def test_no_syncs_without_strace(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    assert np.isnan(beside.count_syncs(lambda: pytest.fail("nothing is started"), 5, tmp_path / "calls"))


def test_pairs_are_measured_in_turn(tmp_path, monkeypatch):
    """Each other pair backwards; ratios are those within a pair, and figures of 0 have none."""
    turns, told = [], []
    monkeypatch.setattr(beside, "install_peer", lambda peer, _progress: tmp_path / peer)
    monkeypatch.setattr(beside, "watch", lambda start, _rounds: turns.append(start) or next(figures))
    monkeypatch.setattr(beside, "count_syncs", lambda *_: float("nan"))
    monkeypatch.setattr(beside.bench, "make_task", lambda: (None, np.zeros((1, 100), np.float32)))
    monkeypatch.setattr(beside.bench, "training_seconds", lambda *_: 0.01)
    monkeypatch.setattr(beside, "cost", lambda *_, **__: COST)
    monkeypatch.setattr(beside, "measure_seal", lambda **_: {"seal_ms_per_mb": 1.0, "open_ms_per_mb": 2.0})
    figures = iter({"cpu_ms": cpu, "written_bytes": cpu - 50.0} for cpu in (300.0, 100.0, 50.0, 60.0, 90.0, 330.0))
    data = beside.measure(2, "mosquitto", "permutation", 20, 2, progress=told.append)
    assert [one.func for one in turns] == [rounds.fleet] + 4 * [beside.flower] + [rounds.fleet]
    assert [one.args[1] for one in turns[1:5]] == ["torch", "numpy", "numpy", "torch"]
    assert turns[1].args[0][:2] == [str(tmp_path / "flower-fleet"), "-I"]
    assert {one.args[-1 if one.func is beside.flower else -2] for one in turns} == {29}
    assert told == [
        "pair 1 of 2: CPU ms a round: shoal 300, flower-torch 100, flower-numpy 50",
        "pair 2 of 2: CPU ms a round: shoal 330, flower-torch 90, flower-numpy 60",
    ]
    assert data["ratios"]["flower-torch"]["cpu_ms"] == pytest.approx((3 + 330 / 90) / 2)
    assert data["ratios"]["flower-numpy"] == {"cpu_ms": 5.75}
    assert data["medians"]["shoal"] == {"cpu_ms": 315.0, "written_bytes": 265.0}
    assert data["history"][1]["flower-numpy cpu_ms"] == 60.0
    assert data["parts"] == {"training": 20.0, "mask": 12.0, "seal": 10.0, "rest": 273.0}
    text = beside.words(data)
    assert "2 pairs of 20 warm rounds, 2 devices" in text[0]
    assert text[-1] == "left out: syncs, for root only, syncs with strace"
    assert len(text) == 1 + 1 + 3 + 2 + 2 + 5


def test_syncs_join_the_medians():
    row = {"shoal": {"cpu_ms": 2.0}, "flower-torch": {"cpu_ms": 1.0}}
    found = beside.summary([row], {"shoal": 41.0, "flower-torch": 0.0})
    assert found["medians"] == {"shoal": {"cpu_ms": 2.0, "syncs": 41.0}, "flower-torch": {"cpu_ms": 1.0, "syncs": 0.0}}


def test_both_clients_of_flower_train_alike():
    """And leave the model that they were given alone."""
    rng = np.random.default_rng(1)
    x, y = rng.random((30, 8), np.float32), rng.integers(0, 3, 30)
    theta = [rng.uniform(-0.5, 0.5, shape).astype(np.float32) for shape in ((6, 8), (6,), (3, 6), (3,))]
    before = [part.copy() for part in theta]
    batches = np.split(rng.permutation(30), (10, 20))
    one, other = (train(theta, x, y, batches, 0.5) for train in (train_numpy, train_torch))
    for part, mine, theirs in zip(before, one, other, strict=True):
        assert not np.array_equal(part, mine)
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
    for part, now in zip(before, theta, strict=True):
        np.testing.assert_array_equal(part, now)
