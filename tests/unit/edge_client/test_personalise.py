"""`shoal-edge personalise`: choose again in this process, or go back to the cluster's model."""

import dataclasses
import json

import numpy as np
import pytest

from edge_client import cli
from edge_client.answers import inference
from edge_client.config import EdgeConfig
from edge_client.learning.data import Dataset
from edge_client.run import finishing
from edge_client.storage.finished_models import FinishedModels
from shoal.errors import ConfigError
from shoal.task.data_declaration import DataDeclaration
from shoal.util.console import run_program
from tests.helpers.fleets import CLASSES, INPUTS, finish_of, grouped_data, make_fleet
from tests.helpers.tasks import logistic_bundle

NAME = "dev-00"


@pytest.fixture
def niceness(monkeypatch):
    """Record changes of the priority of this process instead of making them."""
    found = []
    monkeypatch.setattr(finishing.os, "setpriority", lambda *arguments: found.append(arguments))
    return found


@pytest.fixture(scope="module")
def ended(tmp_path_factory):
    with make_fleet(tmp_path_factory.mktemp("run") / "fleet", grouped_data(4, 2)) as made:
        made.run(100)
        made.settle()
        yield made


@pytest.fixture
def folder(ended):
    directory = ended.stage.device_dir(NAME)
    yield directory
    for path in (directory / "finished").glob("personal-*"):
        path.unlink()


@pytest.fixture
def source(tmp_path):
    data = grouped_data(4, 2)[NAME]
    np.savez(tmp_path / "d.npz", x=data.x, y=data.y)
    return tmp_path / "d.npz"


def test_command_chooses_as_the_device_does(ended, folder, source, niceness):
    """The command chooses as the running device does."""
    finish_of(ended, NAME)
    store = FinishedModels(folder)
    by_device = store.personal(store.models()[-1])[0]
    model, choice = finishing.personalise(EdgeConfig(folder, source))
    assert (model.run, choice.choice, choice.fits) == (1, by_device.choice, by_device.fits)
    assert niceness == [(finishing.os.PRIO_PROCESS, 0, 19)]


def test_finish_is_in_the_runs_scale(tmp_path, niceness):
    """A task that standardises is finished in the scale of its run."""
    plain = logistic_bundle(INPUTS, CLASSES)
    task = dataclasses.replace(plain.manifest, data=DataDeclaration(standardise="local"))
    data = {name: Dataset(d.x * np.float32(1000) + np.float32(7), d.y) for name, d in grouped_data(4, 2).items()}
    with make_fleet(tmp_path / "fleet", data, bundle=dataclasses.replace(plain, manifest=task)) as fleet:
        fleet.run(100)
        fleet.settle()
        finish_of(fleet, NAME)
        folder = fleet.stage.device_dir(NAME)
    np.savez(tmp_path / "d.npz", x=data[NAME].x, y=data[NAME].y)
    store = FinishedModels(folder)
    by_device = store.personal(store.models()[-1])[0]
    assert finishing.personalise(EdgeConfig(folder, tmp_path / "d.npz"))[1].fits == by_device.fits
    assert inference.choose(folder).evaluate(tmp_path / "d.npz").accuracy > 0.5


def test_without_a_model_it_says_so(tmp_path):
    """A device without a finished model says so."""
    with make_fleet(tmp_path / "fleet") as fleet:
        directory = fleet.stage.device_dir(NAME)
        with pytest.raises(ConfigError, match="no finished model yet"):
            finishing.personalise(EdgeConfig(directory, tmp_path / "none.npz"))
        with pytest.raises(ConfigError, match="no finished model yet"):
            finishing.back_to_cluster(FinishedModels(directory))


def test_nothing_to_go_back_from(folder):
    """There is nothing to go back from before a choice."""
    with pytest.raises(ConfigError, match="has not made a choice after run 1"):
        finishing.back_to_cluster(FinishedModels(folder))


def test_the_command_line(folder, source, niceness, capsys, monkeypatch):
    def call(*arguments):
        monkeypatch.setattr("sys.argv", ["shoal-edge", *map(str, arguments)])
        with pytest.raises(SystemExit) as done:
            run_program(cli.app, prog="shoal-edge")
        return done.value.code, capsys.readouterr()

    def data(*arguments):
        code, said = call(*arguments, "--json")
        assert not code
        return json.loads(said.out)["data"]

    assert "personal" not in data("status", folder)
    made = data("personalise", folder, "--data", source)
    assert made["choice"] in made["losses"]
    assert made["choice"] != "cluster"
    assert data("status", folder)["personal"] == made
    answers = data("predict", folder, "--data", source)
    assert answers["choice"] == made["choice"]
    written = data("export", folder, folder.parent / "m.onnx")
    assert written["choice"] == made["choice"]
    code, said = call("status", folder)
    assert f"of run 1; losses on {made['samples']} samples, cross-validated in 5 parts: the cluster's model" in said.out
    code, said = call("personalise", folder, "--cluster")
    assert (code, said.out.startswith("the cluster's model of run 1, as asked; losses on")) == (0, True)
    assert data("predict", folder, "--data", source)["choice"] == "cluster"
    assert data("status", folder)["personal"]["by_hand"]
    code, said = call("personalise", folder)
    assert code
    assert "give --data, or --cluster" in said.err
    monkeypatch.setenv("SHOAL_EDGE_PERSONAL", "-1")
    code, said = call("personalise", folder, "--data", source)
    assert code
    assert "a weight above 0" in said.err


def test_damaged_choice_is_reported(folder, source, niceness, capsys):
    """A damaged choice is reported by status."""
    finishing.personalise(EdgeConfig(folder, source))
    (path,) = (folder / "finished").glob("personal-*")
    path.write_bytes(b"x" * 50)
    cli.status(folder)
    assert "is damaged (choose again with: shoal-edge personalise" in capsys.readouterr().out
