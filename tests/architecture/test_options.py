"""Options: a guide names each of the product's, all programs together have a budget of them, and each help fits a screen."""

from __future__ import annotations

import functools
import importlib
import re
import tomllib
from collections.abc import Iterator
from typing import Any

from typer.main import get_command

from tests.helpers.trees import ROOT

MOST = {"shoal-edge": 45, "shoal-aggregator": 24, "shoal-keeper": 6, "shoal-fleet": 117, "shoal": 10, "shoal-lab": 68}
"""Options that the commands of a program may have, without those that all programs have (OF_ALL). Who adds one raises its line,
and says in the change why a setting of the file does not do."""
MOST_OF_ALL = 270
MOST_LINES = 60
"""Of a command's help, in a terminal of 80 columns."""
OF_ALL = {"--help", "--help-all", "--version", "--install-completion", "--show-completion"}
GUIDES = [ROOT / "README.md", ROOT / "deploy" / "README.md", ROOT / "lab" / "README.md"]


def commands(command: Any) -> Iterator[Any]:
    """Yield a command of typer's and all below it."""
    yield command
    for below in getattr(command, "commands", {}).values():
        yield from commands(below)


@functools.cache
def applications() -> dict[str, list[Any]]:
    """Return the typer applications of each program, and under shoal-lab those that the lab adds to `shoal`."""
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    lab = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]["entry-points"]["shoal.commands"]
    places = {name: [f"{place.split(':')[0]}:app"] for name, place in scripts.items()} | {"shoal-lab": lab.values()}
    split = {name: [place.partition(":") for place in of_program] for name, of_program in places.items()}
    return {name: [getattr(importlib.import_module(m), app) for m, _, app in found] for name, found in split.items()}


def options() -> dict[str, list[str]]:
    """Return the options of all commands of each program."""
    found = dict[str, list[str]]()
    for name, apps in applications().items():
        parameters = [p for app in apps for command in commands(get_command(app)) for p in command.params]
        taken = [max(p.opts, key=len) for p in parameters if p.param_type_name == "option"]
        found[name] = sorted(option for option in taken if option not in OF_ALL)
    return found


def test_the_budget_of_options():
    assert sum(MOST.values()) <= MOST_OF_ALL
    assert {program: len(found) for program, found in options().items() if len(found) > MOST[program]} == {}


def test_each_option_is_in_a_guide():
    pages = [p for p in (ROOT / "docs").rglob("*.md") if not {"adr", "reference"} & set(p.relative_to(ROOT).parts)]
    text = "\n".join(page.read_text() for page in [*GUIDES, *pages])
    named = set(re.findall(r"--[a-z][a-z-]*", text))
    product = {option for program, found in options().items() if program != "shoal-lab" for option in found}
    assert product - named == set()


def test_the_help_fits_a_screen(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    for app in (app for found in applications().values() for app in found):
        for command in commands(get_command(app)):
            with command.make_context("", [], resilient_parsing=True) as context:
                assert len(command.get_help(context).splitlines()) <= MOST_LINES, command.name
