"""The serving process: with ``--json`` it prints the runs that have ended."""

import json
import os
from pathlib import Path

import pytest

from edge_client import serving
from edge_client.config import EdgeConfig
from edge_client.storage.state import DeviceState
from shoal.util.files import private_directory


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Let the process serve a device that has finished a run, without a broker."""
    directory = private_directory(tmp_path / "dev-1")
    config = EdgeConfig(dir=directory, data=tmp_path / "x.npz")
    DeviceState(directory).save_status(
        {"device": "dev-1", "fleet": "reef", "stage": "idle", "ended": {"1": {"rounds": 4}}}
    )
    monkeypatch.setattr(serving, "prepare", lambda _config: None)
    monkeypatch.setattr(serving, "leave_out", lambda _name: None)
    monkeypatch.setattr(serving, "put_off", lambda _name: None)
    monkeypatch.setattr("edge_client.daemon.serve", lambda _config: None)
    return lambda as_json: serving.serve_and_report(config, as_json=as_json)


def test_the_runs_that_have_ended_as_json(serve, capsys):
    """Nothing is printed unless it is asked for."""
    serve(False)
    assert capsys.readouterr().out == ""
    serve(True)
    data = json.loads(capsys.readouterr().out)["data"]
    assert data == {"device": "dev-1", "fleet": "reef", "ended": {"1": {"rounds": 4}}}


def test_number_reaches_the_libraries(monkeypatch):
    """A number of the environment reaches the libraries."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX"):
        monkeypatch.setenv(name, "7")
    path = Path("/proc/self/comm")
    before = path.read_text()
    monkeypatch.setattr(serving, "small_heap", lambda: True)
    try:
        serving.prepare(EdgeConfig(Path("d"), Path("x"), threads=3))
        assert path.read_text() == "shoal-edge\n"
    finally:
        path.write_text(before)
    assert [os.environ[n] for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX")] == ["3", "3", "1"]
