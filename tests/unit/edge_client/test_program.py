"""`shoal-edge run` with plain options serves without typer, and with the settings that typer would have read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from edge_client import cli, program, serving
from edge_client.program import plain_run

PLAIN = [
    ["run", "dev-1", "--data", "x.npz"],
    ["run", "--data", "x y.csv", "dev-1", "--label", "class"],
    ["run", "dev-1", "--data", "x.npz", "--log", "warning", "--once", "--no-vitals", "--watch"],
    ["run", "dev-1", "--data", "x.npz", "--data", "y.npz", "--once", "--forever", "--vitals", "--read-once"],
    ["run", "dev-1", "--data", "x", "--metered", "08:00-20:00", "--personal", "0.5", "--max-kbps", "64", "--json"],
    ["run", "./dev-1", "--data", "./x", "--personal", "off", "--config", "edge.toml"],
]
NOT_PLAIN = [
    [],
    ["--help"],
    ["status", "dev-1"],
    ["run", "--help"],
    ["run", "dev-1", "-h"],
    ["run", "dev-1", "dev-2"],
    ["run", ""],
    ["run", "dev-1", "--data"],
    ["run", "dev-1", "--data", "--once"],
    ["run", "dev-1", "--data", ""],
    ["run", "dev-1", "--data=x.npz"],
    ["run", "dev-1", "--dir", "x"],
    ["run", "--", "dev-1"],
    ["run", "dev-1", "--executor", "numpy"],
    ["run", "dev-1", "--data", "x", "--ca", "ca.pem"],
    ["run", "dev-1", "--max-kbps", "slow"],
    ["run", "dev-1", "--max_kbps", "64"],
    ["run", "dev-1", "--dat", "x.npz"],
    ["run", "dev-1", "--mask", "on"],
    ["run", "dev-1", "--data", "x", "--broker", "mqtt://dev-1:secret@broker"],
]


@pytest.fixture
def served(monkeypatch, tmp_path):
    """What the programs would serve with: a list of (configuration, ``as_json``)."""
    found = []
    monkeypatch.setattr(serving, "serve_and_report", lambda config, as_json: found.append((config, as_json)))
    monkeypatch.setattr("shoal.util.console.run_program", lambda app, **_: app())
    monkeypatch.chdir(tmp_path)
    return found


@pytest.mark.parametrize("arguments", PLAIN, ids=" ".join)
def test_plain_options_mean_the_same(arguments, monkeypatch, tmp_path, served):
    (tmp_path / "edge.toml").write_text('[edge]\nthreads = 2\nlabel = "y"\n')
    monkeypatch.setenv("SHOAL_EDGE_MAX_KBPS", "64")
    monkeypatch.setattr(sys, "argv", ["shoal-edge", *arguments])
    program.main()
    assert CliRunner().invoke(cli.app, arguments, catch_exceptions=False).exit_code == 0
    assert served[0] == served[1]
    assert served[0][0].max_kbps == 64


@pytest.mark.parametrize("arguments", NOT_PLAIN, ids=" ".join)
def test_all_else_is_left_to_typer(arguments, monkeypatch):
    assert plain_run(arguments) is None
    called = []
    monkeypatch.setattr(cli, "main", lambda: called.append(arguments))
    monkeypatch.setattr(sys, "argv", ["shoal-edge", *arguments])
    program.main()
    assert called == [arguments]


def test_every_option_is_plain():
    command = typer.main.get_command(cli.app).commands["run"]
    options = {option: p for p in command.params for option in (*p.opts, *p.secondary_opts) if option.startswith("--")}
    for option, parameter in options.items():
        arguments = ["run", "dev-1", option]
        if option in ("--json", "--help"):
            continue
        if parameter.is_flag:
            on = option not in parameter.secondary_opts
            assert plain_run(arguments) == {"dir": Path("dev-1"), parameter.name: on}
        else:
            plain = plain_run([*arguments, "1"])
            assert plain == {"dir": Path("dev-1"), parameter.name: plain[parameter.name]}, option
