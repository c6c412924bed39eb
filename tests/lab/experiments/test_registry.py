"""Studies by name, and the tables that they are read from."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from shoal_lab.experiments import registry
from shoal_lab.experiments.common.experiment import Options, Quiet, Study
from shoal_lab.experiments.data import datasets
from shoal_lab.experiments.studies.run import MEASURES
from shoal_lab.experiments.studies.tasks import TASKS

from shoal.errors import UsageError
from tests.helpers import documents
from tests.helpers.studies import run
from tests.lab.experiments.results import result

TABLE = """
[defaults.values]
lr = 0.1
[mine]
paper = "ours"
title = "a title"
task = "power-law"
measure = "best-round"
algorithms = ["fedavg"]
methods.fedavg = {strategy = "fedavg"}
"""


@pytest.fixture
def toy(monkeypatch):
    """A registered study, forgotten afterwards."""
    monkeypatch.setattr(registry, "_added", {})
    study = Study("toy", "none", "a toy", ("fedavg",), {}, lambda *_: result())
    registry.register(study)
    return study


def test_a_registered_study_runs(toy):
    assert registry.find("toy") is toy
    assert registry.ids()[-1] == "toy"
    assert toy.run(Options(), Quiet())["accuracy"] == 91.5
    for taken in (toy, registry.find("wild")):
        with pytest.raises(UsageError, match="already"):
            registry.register(taken)


def test_an_unknown_study_has_a_near_one():
    with pytest.raises(UsageError, match="no experiment 'cfl-toy'") as caught:
        registry.find("cfl-toy")
    assert caught.value.hint.startswith("do you mean cfl-toys? there are cfl-congruence, ")
    # Eighteen tables and figures of the papers, the placement of newcomers, and wild fleets.
    assert len(registry.ids()) == len(set(registry.ids())) == 20


@pytest.mark.parametrize("name", registry.ids())
def test_a_table_names_what_there_is(name):
    """And a published figure for none but its algorithms; a method's "$NAME" is a value."""
    study = registry.find(name)
    assert set(study.needs) <= set(datasets.names())
    assert set(study.published) <= set(study.algorithms)
    assert study.task in {*TASKS, ""}
    assert study.measure in {*MEASURES, ""}
    for algorithm in study.algorithms:
        assert study.resolved(Options(algorithm=algorithm)).algorithm == algorithm


def test_a_list_of_names_needs_no_torch():
    check = "import sys; from shoal_lab.experiments import registry; registry.ids(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", check], check=True)


def test_a_file_of_ones_own_is_a_study(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(TABLE)
    study = registry.find(str(path))
    assert (study.id, study.title, study.values, study.published) == ("mine", "a title", {"lr": 0.1}, {"fedavg": None})


@pytest.mark.parametrize("algorithm", ["ifca", "fedavg", "local"])
def test_the_pages_study_runs(tmp_path, algorithm):
    """Under the name of its file, with settings of the table and of the strategy."""
    (block,) = documents.blocks("docs/researcher/studies.md", "toml")
    path = tmp_path / "few.toml"
    path.write_text("\n".join(block.lines))
    data = run(str(path), algorithm=algorithm, settings={"groups": 3, "lr": 0.1}, rounds=2)
    assert (data["experiment"], data["rounds"], data["parameters"]["lr"]) == ("few-devices", 2, 0.1)
    assert data["parameters"]["settings"] == ({"k": "3"} if algorithm == "ifca" else {})


@pytest.mark.parametrize(
    ("old", "new", "message", "hint"),
    [
        ('task = "synthetic"', 'task = "synthetc"', "no task 'synthetc'", "do you mean synthetic?"),
        ('measure = "starts"', 'measure = "start"', "no measure 'start'", "do you mean starts?"),
        ("shape_beta = 1.0", "", "lacks the value 'shape_beta'", "add shape_beta = ... under values"),
        ("groups = 2", "", "lacks the value 'groups'", "add groups"),
        ("devices = 10", "", "how many devices?", "give --devices"),
        ("rounds = 5", "", "how many rounds?", "give --rounds"),
    ],
)
def test_what_a_table_needs_is_asked_for(tmp_path, old, new, message, hint):
    (block,) = documents.blocks("docs/researcher/studies.md", "toml")
    path = tmp_path / "few.toml"
    path.write_text("\n".join(block.lines).replace(old, new))
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        run(str(path))
    assert caught.value.hint.startswith(hint)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has 0 studies"),
        (TABLE + TABLE.replace("mine", "other").replace("defaults", "others"), "is no table"),
        ("[mine]\ntitle = 3 4", "Expected newline"),
        (TABLE + 'colour = "red"', "unexpected keyword argument 'colour'"),
        ("mine = 3", "is no table"),
        (TABLE + 'devices = "ten"', "devices of mine is no int"),
        ("[mine]\ntitle = 'x'", "lacks 'algorithms'"),
    ],
)
def test_a_file_that_is_no_study_is_refused(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        registry.find(str(path))
    with pytest.raises(UsageError, match="can't be read"):
        registry.find(str(tmp_path / "none.toml"))
