"""Tasks for devices' own training code on the owner's command line, from the layout to a signed run, without torch."""

import json

import numpy as np
import pytest

from crypto.seal.identity import Identity
from edge_client.answers.inference import export
from shoal.errors import TaskError, UsageError
from shoal.owner.cli import main, runs
from shoal.owner.keys.vault import run_file
from shoal.owner.task_compiler.signed import read_signed
from tests.helpers.receiving import device_card

VALUES = {"weight": np.zeros((4, 3)), "mean": np.ones(2)}


@pytest.fixture
def fleet(fleet, tmp_path):
    fleet.add_device(device_card(Identity.generate("dev-3")))
    np.savez(tmp_path / "layout.npz", **VALUES)
    return fleet


def compiled(fleet, out="task", **changes):
    options = {"trainer": "own:1", "private": ["mean"], "sample": "4", "option": ["classes=3"]}
    place = fleet.path.parent
    main.compile_(fleet.path, str(place / "layout.npz"), place / out, **(options | changes))
    return place / out


def test_a_run_begins_with_the_layout(fleet, capsys):
    task = compiled(fleet, json=True)
    told = json.loads(capsys.readouterr().out)["data"]
    assert (told["coordinates"], told["private_coordinates"], told["graph_bytes"]) == (14, 2, 0)
    assert told["lite"] == "devices train it with own:1; starting models: 1"
    assert not list(task.glob("*.onnx"))
    runs.start(fleet.path, task=task, algorithm="fedavg", out=fleet.path.parent / "run", min_contributors=2, rounds=3)
    assert run_file(fleet.path, 1).exists()
    assert "private: mean" in capsys.readouterr().err


def test_too_few_starting_models_are_refused(fleet):
    """And options that do not fit."""
    task = compiled(fleet)
    with pytest.raises(UsageError, match="begins with 2 models, and the task has initial values for 1"):
        runs.start(fleet.path, task=task, algorithm="ifca", setting=["k=2"], out=fleet.path.parent / "run")
    assert not run_file(fleet.path, 1).exists()
    with pytest.raises(UsageError, match="takes classes=NUMBER alone"):
        compiled(fleet, option=["inputs=4"])
    with pytest.raises(UsageError, match="describe the data of a --trainer"):
        compiled(fleet, trainer="")
    bundle, _ = read_signed(task, fleet.owner)
    with pytest.raises(TaskError, match="no ONNX form"):
        export(bundle, np.zeros(14, np.float32), fleet.path.parent / "m.onnx")
