"""`shoal-fleet models`: the lines and the JSON of both commands, for a run in each state."""

import json

import pytest

from shoal.errors import ConfigError, NotReadyError
from shoal.owner.cli import models as cli
from shoal.owner.keys.vault import VERSIONS_FILE
from tests.helpers.fleets import CLASSES, INPUTS, grouped_data, make_fleet
from tests.helpers.owner_models import reader_of
from tests.helpers.tasks import logistic_bundle

IFCA = {"algorithm": "ifca", "rounds": 4, "settings": {"k": "2"}, "mode": "rotation"}


@pytest.fixture
def connect(monkeypatch):
    """Let the commands read from a loopback fleet instead of an MQTT broker."""

    def to(fleet):
        def read(_fleet, _wait_s, _tell, run=0):
            return reader_of(fleet, run)

        monkeypatch.setattr("shoal.owner.models.reader.read_models", read)
        return fleet.stage.fleet.path

    return to


def lines(capsys):
    return capsys.readouterr().out.splitlines()


def test_list_follows_the_run(tmp_path, connect, capsys):
    with make_fleet(tmp_path / "fleet", grouped_data(4, 2), **IFCA) as fleet:
        owner = connect(fleet)
        fleet.run_until(lambda: fleet.closed() >= 2, 60)
        cli.list_(owner)
        line, answering = lines(capsys)
        assert line.startswith("run 1: ifca, 4 rounds; in round ")
        assert answering == "4 online devices with no finished model yet"
        fleet.run(60)
        cli.list_(owner)
        assert lines(capsys) == [
            "run 1: ifca, 4 rounds; models at the broker",
            "  model 0: state of round 0",  # no device chose it
            "  model 1: state of round 4",
            "4 online devices with the model of run 1",
        ]
        fleet.broker.retained.clear()
        cli.list_(owner, json=True)
        (run,) = json.loads(capsys.readouterr().out)["data"]["runs"]
        assert (run["state"], run["round"], run["models"]) == ("absent", None, [])


def test_get_erases_older_versions(tmp_path, connect, capsys):
    """Get prints the files and erases older key versions."""
    data = grouped_data(4, 2)
    with make_fleet(tmp_path / "fleet", data, **IFCA) as fleet:
        owner = connect(fleet)
        fleet.run_until(lambda: fleet.closed() >= 1, 60)
        fleet.stage.fleet.rotate()
        fleet.publish()
        fleet.run(60)
        assert (owner / VERSIONS_FILE).exists()
        assert len(fleet.stage.fleet.versions) == 2
        cli.get(owner, tmp_path / "m")
        names = ["model-0.onnx", "model-0.npz", "model-1.onnx", "model-1.npz", "models.json"]
        assert lines(capsys) == [str(tmp_path / "m" / name) for name in names]
        assert len(fleet.stage.fleet.versions) == 1
        with pytest.raises(ConfigError, match="holds models already"):
            cli.get(owner, tmp_path / "m")
        cli.get(owner, tmp_path / "m", run=1, force=True, json=True)
        assert json.loads(capsys.readouterr().out)["data"]["final_round"] == 5


def test_get_tells_of_initial_values(tmp_path, connect, capsys):
    """Get says that private coordinates are the initial ones."""
    bundle = logistic_bundle(INPUTS, CLASSES, private=[1.0, 2.0, 3.0, 4.0])
    with make_fleet(tmp_path / "fleet", bundle=bundle) as fleet:
        fleet.run(60)
        cli.get(connect(fleet), tmp_path / "m")
    told = capsys.readouterr().err
    assert "4 private coordinates (bias) have the task's initial values: each device has its own" in told


def test_get_of_an_unfinished_run(tmp_path, connect):
    """Get of a run that has not finished writes nothing."""
    with make_fleet(tmp_path / "fleet", grouped_data(4, 2), **IFCA) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, 60)
        with pytest.raises(NotReadyError) as caught:
            cli.get(connect(fleet), tmp_path / "m")
        assert caught.value.exit_code == 11
        assert not (tmp_path / "m").exists()
