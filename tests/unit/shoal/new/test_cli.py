"""`shoal new`: every start runs, and its own tests pass; writing the files of a start."""

import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.errors import ConfigError
from shoal.new import cli
from shoal.new.cli import KINDS
from tests.helpers.trees import ROOT

BOTH = """
import runpy, sys, pytest
runpy.run_path("my_idea.py", run_name="__main__")
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "."]))
"""
"""Runs a start and its tests, in one process: the imports take longer than both."""


@pytest.fixture
def new(tmp_path, monkeypatch):
    """Call `shoal new` in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return lambda *arguments: CliRunner().invoke(app, ["new", *arguments])


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "kind", ["strategy", *(pytest.param(k, marks=pytest.mark.long) for k in KINDS if k != "strategy")]
)
def test_a_start_runs_and_its_tests_pass(tmp_path, new, kind):
    folder = tmp_path / "my-idea"
    told = new(kind, "my-idea")
    assert told.exit_code == 0, told.output
    assert sorted(told.stdout.splitlines()) == sorted(f"my-idea/{path.name}" for path in folder.iterdir())
    assert not any("$" in path.read_text() for path in folder.iterdir())
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BOTH], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_and_next_steps_are_printed(tmp_path, new):
    told = new("strategy", "my-idea")
    assert told.stdout.splitlines() == [f"my-idea/{f}" for f in ("my_idea.py", "pyproject.toml", "test_my_idea.py")]
    assert "next: python my-idea/my_idea.py; pytest my-idea" in told.stderr
    assert "pip install -e ./my-idea, and use it by its name, my-idea" in told.stderr
    assert 'my-idea = "my_idea:MyIdea"' in (tmp_path / "my-idea" / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model", "x"), "there is no start for 'model'"),
        (("task", "My-Idea"), "the name 'My-Idea' is not 1 to 40 lower-case letters"),
        (("task", "class"), "the name 'class' is not"),
        (("task", "../x"), "is not 1 to 40"),
    ],
)
def test_mistakes_are_told(tmp_path, new, arguments, message):
    told = new(*arguments)
    assert message in str(told.exception)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_with_files_is_left_alone(tmp_path, new):
    (tmp_path / "my-idea").mkdir()
    (tmp_path / "my-idea" / "mine").write_text("x")
    told = new("task", "my-idea")
    assert "is not empty" in str(told.exception)
    assert [path.name for path in (tmp_path / "my-idea").iterdir()] == ["mine"]


def test_names_fill_the_templates(tmp_path):
    """Names stand where the templates have them."""
    paths = cli.write_start("strategy", "two-words", tmp_path / "new")
    text = (tmp_path / "new" / "two_words.py").read_text()
    assert "class TwoWords(shoal.FedAvg):" in text
    assert [path.name for path in paths] == ["pyproject.toml", "test_two_words.py", "two_words.py"]


def test_folder_that_cannot_be_made_is_error(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(ConfigError, match="can't write"):
        cli.write_start("task", "idea", tmp_path / "file" / "new")


def test_missing_templates_are_told(tmp_path, monkeypatch):
    """An installation without templates is told."""
    monkeypatch.setattr(cli, "files", lambda _: tmp_path)
    (tmp_path / "templates" / "task").mkdir(parents=True)
    with pytest.raises(ConfigError, match="no templates for a task"):
        cli.write_start("task", "idea", tmp_path / "new")
