"""`shoal`: its own commands and those of other packages, and the demo's page."""

from __future__ import annotations

import dataclasses

import pytest
import typer

pytest.importorskip("torch")

from shoal import cli
from shoal.errors import ConfigError
from shoal.page.history import RunHistory, history_of
from tests.helpers.demos import made
from tests.helpers.pages import names, record
from tests.helpers.refusals import refused


@pytest.fixture
def program():
    return typer.main.get_command(cli.app)


def test_labs_commands_are_entry_points(program):
    """The labs commands are found by their entry points."""
    context = program.make_context("shoal", [], resilient_parsing=True)
    assert set(program.list_commands(context)) == {"demo", "bench", "data", "new", "simulate"}
    assert {name: program.get_command(context, name).name for name in cli.LAB_COMMANDS} == {
        name: name for name in cli.LAB_COMMANDS
    }
    assert program.get_command(context, "no-such") is None


def test_missing_lab_says_what_to_install(program, monkeypatch):
    """Without the lab its commands say what to install."""
    monkeypatch.setattr("shoal.util.extensions.entry_points", lambda **_: ())
    context = program.make_context("shoal", [], resilient_parsing=True)
    assert set(program.list_commands(context)) == {"demo", "new"}
    for name in cli.LAB_COMMANDS:
        with refused(ConfigError, f"`shoal {name}` is in the package shoal-lab", hint="shoal-lab"):
            program.get_command(context, name)
    assert program.get_command(context, "no-such") is None
    assert program.get_command(context, "demo").name == "demo"


# ------------------------------------------------------------------------------------------------ the demo's page


def test_the_demos_page_is_written_and_shown(tmp_path, monkeypatch, capsys):
    shown = []
    monkeypatch.setattr("webbrowser.open", lambda url: shown.append(url) or True)
    run = history_of(RunHistory(name="cfl", algorithm="cfl", rounds=2), [record(1, names(3))]).document()
    page = dataclasses.replace(made(8), pages=(run,)).page()
    cli._show_page(page, tmp_path / "demo.html", browse=True)
    assert shown == [(tmp_path / "demo.html").as_uri()]
    assert b"20 devices in 4 hidden groups." in (tmp_path / "demo.html").read_bytes()
    assert str(tmp_path / "demo.html") in capsys.readouterr().err


def test_missing_browser_says_where_page_is(tmp_path, monkeypatch, capsys):
    """Without a browser the demo says where its page is."""
    monkeypatch.setattr("webbrowser.open", lambda _url: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cli._show_page(b"page", None, browse=True)
    said = capsys.readouterr().err
    assert "no browser can be opened here" in said
    (path,) = tmp_path.glob("shoal-demo-*/demo.html")
    assert str(path) in said
    cli._show_page(b"page", None, browse=False)
    assert len(list(tmp_path.glob("shoal-demo-*"))) == 1
