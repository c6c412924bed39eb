"""Console conventions: data on stdout, the rest on stderr, one JSON object, exit codes by class of error.

Work that takes long says so; short work says nothing.
"""

import importlib
import importlib.metadata
import io
import json
import logging
import os
import re
import subprocess
import sys
import threading
import time

import pytest
import typer

from shoal.errors import BrokerUnreachableError, ConfigError, DataError, ShoalError, UntrustedError, UsageError
from shoal.util.console import (
    EXIT_UNHEALTHY,
    Check,
    LogfmtFormatter,
    add_version,
    checked,
    colour_wanted,
    counted,
    day,
    mask_words,
    note,
    ok,
    report,
    run_program,
    say,
    say_json,
    say_result,
    second,
    setup_logging,
    span,
    working,
)
from tests.helpers.refusals import refused
from tests.helpers.trees import PROGRAMS, ROOT, python


def record(message="done", level=logging.INFO, **pairs):
    made = logging.LogRecord("shoal.edge", level, __file__, 1, message, (), None)
    if pairs:
        made.kv = pairs
    return made


def test_data_and_notes_go_their_own_ways(capsys):
    """A result in both forms; JSON is one object with its schema."""
    say("data")
    note("talk")
    assert capsys.readouterr() == ("data\n", "talk\n")
    say_json({"a": [1, None]})
    assert json.loads(capsys.readouterr().out) == {"schema": 1, "ok": True, "data": {"a": [1, None]}}
    with pytest.raises(ValueError, match="JSON compliant"):
        say_json({"loss": float("nan")})
    say_result({"eels": 2}, "two eels", "no more", as_json=False)
    assert capsys.readouterr().out == "two eels\nno more\n"
    say_result({"eels": 2}, "two eels", as_json=True)
    assert json.loads(capsys.readouterr().out)["data"] == {"eels": 2}


def test_words_for_numbers_and_masks():
    """One thing is no plural; a rotation is printed with what the secret is."""
    assert [counted(n, "round") for n in range(3)] == ["0 rounds", "1 round", "2 rounds"]
    assert mask_words("rotation") == "rotation (secret permutation, signs, Hadamard)"
    assert mask_words("permutation") == "permutation"


def test_logfmt_on_a_pipe():
    """A terminal gets the level and no timestamp; an exception becomes one line."""
    line = LogfmtFormatter(terminal=False).format(
        record('say "hi"', round=3, dur_s=0.123456, where="a b", empty="", plain="x=1")
    )
    head, _, tail = line.partition(" level=")
    assert re.fullmatch(r"ts=.*Z", head)
    assert tail == r'info logger=shoal.edge msg="say \"hi\"" round=3 dur_s=0.1235 where="a b" empty="" plain="x=1"'
    line = LogfmtFormatter(terminal=True).format(record("lost", logging.WARNING, round=3))
    assert line == "\x1b[33mwarning\x1b[0m lost round=3"
    made = record("failed", logging.ERROR)
    made.exc_info = (ConfigError, ConfigError("no such file"), None)
    line = LogfmtFormatter(terminal=False).format(made)
    assert line.endswith('msg="failed: no such file"')
    assert "\n" not in line


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("stream", "no_colour", "wanted"), [(Terminal(), "", True), (Terminal(), "1", False), (io.StringIO(), "", False)]
)
def test_colour_is_for_willing_terminals(monkeypatch, stream, no_colour, wanted):
    """Colour is for terminals whose person wants it."""
    monkeypatch.setenv("NO_COLOR", no_colour)
    assert colour_wanted(stream) is wanted


def test_log_level_that_there_is_not_is_told():
    with refused(UsageError, "no log level 'foo'", hint_is="one of debug, info, warning, error"):
        setup_logging("foo")


def run(monkeypatch, app, *arguments):
    monkeypatch.setattr(sys, "argv", ["prog", *arguments])
    with pytest.raises(SystemExit) as caught:
        run_program(app, prog="prog")
    return caught.value.code


def failing(error):
    def app(*, prog_name):
        raise error

    return app


@pytest.mark.parametrize(
    ("error", "code", "told"),
    [
        (ConfigError("it is off", hint="turn it on"), 3, "error: it is off\nhint: turn it on\n"),
        (BrokerUnreachableError("x"), 5, "error: x"),
        (UntrustedError("x"), 6, "error: x"),
        (ShoalError("x"), 1, "error: x"),
        (KeyError("x"), 1, "unexpected KeyError: 'x'"),
        (RuntimeError("boom"), 1, "unexpected RuntimeError: boom"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_exit_code_says_what_kind_of_failure(monkeypatch, capsys, error, code, told):
    """An error and its hint are two lines; an unexpected failure is called a bug."""
    assert run(monkeypatch, failing(error)) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert told in err
    assert "Traceback" not in err


def test_with_json_failure_is_an_object_too(monkeypatch, capsys):
    run(monkeypatch, failing(ConfigError("it is off", hint="turn it on")), "--json")
    out, err = capsys.readouterr()
    expected = {"type": "ConfigError", "message": "it is off", "hint": "turn it on"}
    assert json.loads(out) == {"schema": 1, "ok": False, "error": expected}
    assert err.startswith("error: it is off")


def test_debug_shows_the_traceback(monkeypatch, capsys):
    """Debug is taken from the arguments. A program that ends well exits with zero."""
    seen = []

    def app(*, prog_name):
        seen.append(list(sys.argv))
        raise ConfigError("it is off")

    assert run(monkeypatch, app, "serve", "--debug") == 3
    assert seen == [["prog", "serve"]]
    assert "Traceback" in capsys.readouterr().err
    assert run(monkeypatch, lambda **_: None) == 0


def into_a_closed_pipe(script, *arguments):
    """Run a script whose stdout is a closed pipe, and return the finished process."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        return subprocess.run(
            [sys.executable, "-c", script, *arguments],
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    finally:
        os.close(writer)


PLAIN = """
from shoal.util.console import run_program, say
run_program(lambda **_: [say("line") for _ in range(3)], prog="prog")
"""
COMMAND = """
import typer
from shoal.util.console import run_program, say
app = typer.Typer()
app.command()(lambda: say("line"))
run_program(app, prog="prog")
"""
HELP = "from shoal.owner.cli.main import main; main()"


@pytest.mark.parametrize(("script", "arguments"), [(PLAIN, []), (COMMAND, []), (HELP, ["--help"])])
def test_gone_reader_ends_it_quietly(script, arguments):
    """`shoal-fleet show | head -1` is no error to complain about: status 141, as of every program in a pipe."""
    done = into_a_closed_pipe(script, *arguments)
    assert (done.returncode, done.stderr) == (141, "")


FAILING = """
from shoal.util.console import run_program
from shoal.errors import UsageError

def app(**_):
    raise UsageError("no such thing")

run_program(app, prog="prog")
"""


@pytest.mark.parametrize(
    ("script", "arguments", "status", "error"),
    [
        (PLAIN, [], 3, "can't write the output: "),
        (COMMAND, [], 3, "can't write the output: "),
        (PLAIN, ["--json"], 3, "can't write the output: "),
        (FAILING, ["--json"], 2, "no such thing\n"),
    ],
)
@pytest.mark.parametrize("where", ["> /dev/full", ">&-"])
def test_unwritable_output_is_no_bug(script, arguments, status, error, where):
    """An output that can't be written is no bug."""
    done = shell(where, script, *arguments)
    assert done.returncode == status
    assert done.stderr.startswith(f"error: {error}")
    assert len(done.stderr.splitlines()) <= 2


def test_unwritable_help_says_why():
    """A help that can't be written says why."""
    done = shell("> /dev/full", HELP, "--help")
    told = "error: can't write the output: No space left on device"
    assert (done.returncode, done.stderr.splitlines()[0]) == (3, told)


def shell(redirection, script, *arguments):
    """Run a script with its stdout redirected by a shell, and return the finished process."""
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )


def test_dead_peer_does_not_end_the_program():
    """A broker that dies while we write costs the connection, not the process: SIGPIPE stays ignored."""
    done = python("""
import socket
from shoal.util.console import run_program, say

def app(**_):
    ours, theirs = socket.socketpair()
    theirs.close()
    try:
        ours.sendall(b"x")
    except BrokenPipeError:
        say("connection lost")
    say("still here")

run_program(app, prog="prog")
""")
    assert (done.returncode, done.stdout, done.stderr) == (0, "connection lost\nstill here\n", "")


@pytest.mark.parametrize("installed", [True, False])
def test_version_is_the_installed_packages(monkeypatch, capsys, installed):
    """The version is that of the installed package."""

    def version(name):
        if not installed:
            raise importlib.metadata.PackageNotFoundError(name)
        return {"shoal": "1.2.3"}[name]

    monkeypatch.setattr(importlib.metadata, "version", version)
    app = typer.Typer()

    @app.command()
    def work():
        raise AssertionError

    add_version(app, prog="shoal-x")
    assert run(monkeypatch, app, "--version") == 0
    assert capsys.readouterr().out == (
        "shoal-x 1.2.3\n" if installed else "shoal-x, run from its source without being installed\n"
    )
    assert run(monkeypatch, app, "--help") == 0
    assert "--debug" in capsys.readouterr().out


def test_every_program_tells_its_version(monkeypatch, capsys):
    for program in PROGRAMS.values():
        monkeypatch.setattr(sys, "argv", ["prog", "--version"])
        monkeypatch.setattr("shoal.util.console.no_core_dumps", lambda: None)
        monkeypatch.setattr("shoal.util.console.forbid_inspection", lambda: None)
        with pytest.raises(SystemExit) as caught:
            importlib.import_module(program).main()
        assert not caught.value.code
        assert capsys.readouterr().out.startswith("shoal")


def test_long_work_says_so_until_its_end(capsys):
    """Again and again, until its end or an error; short work says nothing."""
    with working("counting"):
        pass
    assert capsys.readouterr().err == ""
    with working("counting", after_s=0.02, every_s=0.02):
        time.sleep(0.3)
    told = capsys.readouterr().err.splitlines()
    assert len(told) >= 3
    assert [line for line in told if not re.fullmatch(r"counting: \d s", line)] == []
    with pytest.raises(ValueError, match="no"), working("counting", after_s=0.1):
        raise ValueError("no")
    time.sleep(0.2)
    assert capsys.readouterr().err == ""
    assert not [t for t in threading.enumerate() if t.name == "progress"]


# -- How the checks of a doctor are printed, and the exit status that they give --


GOOD, POOR, BAD = (
    ok("disk", "9 MiB free"),
    Check("tls", "warning", "none", "use TLS"),
    Check("data", "failure", "-", "x"),
)


def test_expected_error_is_a_failure():
    """With its hint; a bug is none."""

    def fail():
        raise ConfigError("can't read it", hint="chmod") from OSError("denied")

    assert checked("file", fail) == Check("file", "failure", "can't read it: denied", "chmod")
    assert checked("disk", lambda: GOOD) is GOOD
    with pytest.raises(KeyError):
        checked("file", {}.popitem)


def test_warnings_end_with_0_failures_10(capsys):
    """Warnings end with status 0 and failures with 10, which is no error's; as JSON the checks come whole as well."""
    report([GOOD, POOR], as_json=False)
    assert capsys.readouterr().out.splitlines() == [
        "ok       disk: 9 MiB free",
        "warning  tls: none",
        "         hint: use TLS",
    ]
    with pytest.raises(SystemExit) as caught:
        report([GOOD, BAD], as_json=False)
    assert caught.value.code == EXIT_UNHEALTHY == 10 != DataError("x").exit_code
    capsys.readouterr()
    with pytest.raises(SystemExit):
        report([BAD], as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert document["data"] == {"checks": [{"name": "data", "result": "failure", "detail": "-", "advice": "x"}]}


# -- Formatting of times, including those out of the calendar's range --


def test_times_are_in_iso_8601():
    """Any time that a message can hold is written."""
    assert (second(10**9), day(10**9)) == ("2001-09-09T01:46:40Z", "2001-09-09")
    assert [at_s for at_s in (2**40, 2**63, 2**64 - 1) if not second(at_s)] == []


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min"), (3600, "1 h"), (7500, "2 h 5 min"), (90000, "1 d 1 h")],
)
def test_a_span_has_its_two_largest_units(seconds, text):
    assert span(seconds) == text
