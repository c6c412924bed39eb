"""The console scripts: each is declared, exists, and answers --help."""

from __future__ import annotations

import tomllib

import pytest

from tests.helpers.trees import ROOT, python

SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]


def test_there_are_five_programs():
    """One an actor, and one for those who try it."""
    assert set(SCRIPTS) == {"shoal", "shoal-edge", "shoal-aggregator", "shoal-keeper", "shoal-fleet"}


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_of_each_program(name):
    """--help prints to stdout, names the program, and ends with status 0."""
    module, function = SCRIPTS[name].split(":")
    script = f"import sys; sys.argv = [{name!r}, '--help']; from {module} import {function}; {function}()"
    done = python(script)
    assert done.returncode == 0, done.stderr
    assert f"Usage: {name} " in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_wrong_option_is_a_usage_error(name):
    """Status 2 and no traceback."""
    module, function = SCRIPTS[name].split(":")
    script = f"import sys; sys.argv = [{name!r}, '--no-such-option']; from {module} import {function}; {function}()"
    done = python(script)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "--no-such-option" in done.stderr


@pytest.mark.parametrize("name", SCRIPTS)
def test_shell_completion_works(name):
    """Typer's own: a script for the shell, and the words that may follow."""
    module, function = SCRIPTS[name].split(":")
    script = f"import sys; sys.argv = [{name!r}, *sys.argv[1:]]; from {module} import {function}; {function}()"
    told = python(script, "--help").stdout
    assert "--install-completion" in told
    assert "--show-completion" in told
    variable = f"_{name.upper().replace('-', '_')}_COMPLETE"
    asking = f"import os; os.environ.update({variable}='complete_bash', COMP_WORDS='{name} ', COMP_CWORD='1'); {script}"
    words = set(python(asking).stdout.split())
    assert words >= ({"bench", "demo"} if name == "shoal" else {"status", "doctor"})
    shown = python(
        f"import os; os.environ['_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION'] = '1'; {script}",
        "--show-completion",
        "bash",
    )
    assert shown.returncode == 0
    assert f"complete -o default -F _{name.replace('-', '_')}_completion {name}" in shown.stdout
