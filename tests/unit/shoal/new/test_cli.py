"""`shoal new`: every start runs, and its own tests pass."""

import json
import os
import subprocess
import sys

import pytest
from typer.testing import CliRunner

from shoal.cli import app
from shoal.new.writing import KINDS
from tests.helpers.trees import ROOT

BOTH = """
import runpy, sys, pytest
runpy.run_path("my_idea.py", run_name="__main__")
sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", "."]))
"""
"""Runs a start and its tests, in one process: the imports take longer than both."""


def new(*arguments):
    return CliRunner().invoke(app, ["new", *map(str, arguments)])


@pytest.mark.torch
@pytest.mark.process
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "kind", ["strategy", *(pytest.param(k, marks=pytest.mark.long) for k in KINDS if k != "strategy")]
)
def test_a_start_runs_and_its_tests_pass(tmp_path, kind):
    folder = tmp_path / "start"
    told = new(kind, "my-idea", "--out", folder, "--json")
    assert told.exit_code == 0, told.output
    data = json.loads(told.stdout)["data"]
    assert (data["kind"], data["name"]) == (kind, "my-idea")
    assert sorted(data["files"]) == sorted(str(path) for path in folder.iterdir())
    assert not any("$" in path.read_text() for path in folder.iterdir())
    environment = {**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", BOTH], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_files_and_next_steps_are_printed(tmp_path):
    told = new("strategy", "my-idea", "--out", tmp_path / "s")
    assert told.stdout.splitlines() == [
        str(tmp_path / "s" / f) for f in ("my_idea.py", "pyproject.toml", "test_my_idea.py")
    ]
    assert f"next: python {tmp_path / 's' / 'my_idea.py'}; pytest {tmp_path / 's'}" in told.stderr
    assert "use it by its name, my-idea" in told.stderr
    assert 'my-idea = "my_idea:MyIdea"' in (tmp_path / "s" / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("model", "x"), "there is no start for 'model'"),
        (("task", "My-Idea"), "the name 'My-Idea' is not 1 to 40 lower-case letters"),
        (("task", "class"), "the name 'class' is not"),
        (("task", "../x"), "is not 1 to 40"),
    ],
)
def test_mistakes_are_told(tmp_path, arguments, message):
    told = new(*arguments, "--out", tmp_path / "s")
    assert message in str(told.exception)
    assert not (tmp_path / "s").exists()


def test_a_folder_with_files_is_left_alone(tmp_path):
    (tmp_path / "mine").write_text("x")
    told = new("task", "my-idea", "--out", tmp_path)
    assert "is not empty" in str(told.exception)
    assert [path.name for path in tmp_path.iterdir()] == ["mine"]
