"""`shoal-edge run` with plain options serves without typer, and with the settings that typer would have read."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from edge_client import cli, program, reexec
from edge_client.config import EdgeConfig
from edge_client.program import plain_run

PLAIN = [
    ["run", "dev-1", "--data", "x.npz"],
    ["run", "--data", "x y.csv", "dev-1", "--label", "class"],
    ["run", "dev-1", "--data", "x.npz", "--log", "warning", "--once", "--no-vitals", "--watch"],
    ["run", "dev-1", "--data", "x.npz", "--data", "y.npz", "--once", "--forever", "--vitals", "--read-once"],
    ["run", "dev-1", "--data", "x", "--ca", "ca.pem"],
    ["run", "dev-1", "--data", "x", "--metered", "08:00-20:00", "--personal", "0.5", "--json"],
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
    ["run", "dev-1", "--max-kbps", "64"],
    ["run", "dev-1", "--max_kbps", "64"],
    ["run", "dev-1", "--dat", "x.npz"],
    ["run", "dev-1", "--mask", "on"],
    ["run", "dev-1", "--data", "x", "--broker", "mqtt://dev-1:secret@broker"],
]


def by_typer(arguments, monkeypatch, folder):
    """Return the configuration and ``as_json`` that the command of typer would serve with."""
    found = []
    monkeypatch.setattr(reexec, "become", lambda config, as_json: found.append((config, as_json)))
    monkeypatch.chdir(folder)
    done = CliRunner().invoke(cli.app, arguments, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return found[0]


def by_program(arguments, monkeypatch, folder):
    """Return the same for the program itself."""
    found = []
    monkeypatch.setattr(reexec, "prepare", lambda _config: None)
    monkeypatch.setattr("edge_client.serving.serve_and_report", lambda config, as_json: found.append((config, as_json)))
    monkeypatch.setattr("shoal.util.console.run_program", lambda app, **_: app())
    monkeypatch.setattr(sys, "argv", ["shoal-edge", *arguments])
    monkeypatch.chdir(folder)
    program.main()
    return found[0]


@pytest.mark.parametrize("arguments", PLAIN, ids=" ".join)
def test_plain_options_mean_the_same_as_to_typer(arguments, monkeypatch, tmp_path):
    (tmp_path / "edge.toml").write_text('[edge]\nthreads = 2\nlabel = "y"\n')
    monkeypatch.setenv("SHOAL_EDGE_MAX_KBPS", "64")
    ours = by_program(arguments, monkeypatch, tmp_path)
    assert ours == by_typer(arguments, monkeypatch, tmp_path)
    assert ours[0].max_kbps == 64


@pytest.mark.parametrize("arguments", NOT_PLAIN, ids=" ".join)
def test_all_else_is_left_to_typer(arguments, monkeypatch):
    assert plain_run(arguments) is None
    called = []
    monkeypatch.setattr(cli, "main", lambda: called.append(arguments))
    monkeypatch.setattr(sys, "argv", ["shoal-edge", *arguments])
    program.main()
    assert called == [arguments]


def test_every_option_is_plain_or_left():
    """Texts, paths and switches are plain, and numbers and addresses are not."""
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
            assert (plain is None) == (parameter.name in ("broker", "max_kbps")), option


def test_a_number_of_the_environment_reaches_the_libraries(monkeypatch):
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX"):
        monkeypatch.setenv(name, "7")
    path = Path("/proc/self/comm")
    before = path.read_text()
    monkeypatch.setattr(reexec, "one_malloc_arena", lambda: True)
    try:
        reexec.prepare(EdgeConfig(Path("d"), Path("x"), threads=3))
        assert path.read_text() == "shoal-edge\n"
    finally:
        path.write_text(before)
    assert [os.environ[n] for n in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MALLOC_ARENA_MAX")] == ["3", "3", "1"]
