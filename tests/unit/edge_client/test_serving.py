"""The serving process: with ``--json`` it prints the runs that have ended."""

import json
import sys

import pytest

from edge_client import serving
from edge_client.config import EdgeConfig
from edge_client.storage.state import DeviceState
from shoal.util.files import private_directory


@pytest.fixture
def serve(tmp_path, monkeypatch):
    """Let the process serve a device that has finished a run, without a broker; call it with its arguments."""
    directory = private_directory(tmp_path / "dev-1")
    config = EdgeConfig(dir=directory, data=tmp_path / "x.npz")
    DeviceState(directory).save_status(
        {"device": "dev-1", "fleet": "reef", "stage": "idle", "ended": {"1": {"rounds": 4}}}
    )
    monkeypatch.setattr(serving, "inherited_config", lambda _arguments: config)
    monkeypatch.setattr(serving, "leave_out", lambda _name: None)
    monkeypatch.setattr(serving, "put_off", lambda _name: None)
    monkeypatch.setattr(serving, "run_program", lambda program, **_: program())
    monkeypatch.setattr("edge_client.daemon.serve", lambda _config: None)

    def call(*more):
        monkeypatch.setattr(sys, "argv", ["serving", str(directory), "3", *more])
        serving.main()

    return call


def test_nothing_is_printed_unless_it_is_asked_for(serve, capsys):
    serve()
    assert capsys.readouterr().out == ""


def test_the_runs_that_have_ended_as_json(serve, capsys):
    serve("--json")
    data = json.loads(capsys.readouterr().out)["data"]
    assert data == {"device": "dev-1", "fleet": "reef", "ended": {"1": {"rounds": 4}}}
