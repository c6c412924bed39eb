"""Figures that are printed even if they can't be saved, and options that are refused before the work."""

from __future__ import annotations

import json
import signal
import types

import pytest
import typer

from shoal.errors import ConfigError, UsageError
from shoal.report.delivery import broker_name, deliver, stop_cleanly, writable
from shoal.util.console import say


@pytest.mark.parametrize("as_json", [False, True])
def test_unsaved_figures_are_printed(tmp_path, capsys, as_json):
    """Figures that can't be saved are printed nevertheless."""
    with pytest.raises(typer.Exit) as caught:
        deliver({"a": 1}, as_json, lambda: say("figures"), tmp_path / "none" / "x.json")
    out, err = capsys.readouterr()
    assert caught.value.exit_code == 3
    assert (json.loads(out)["data"] == {"a": 1}) if as_json else (out == "figures\n")
    assert "error: can't write" in err


def test_saved_figures_are_the_printed_ones(tmp_path, capsys):
    """Saved figures are those that are printed."""
    deliver({"a": 1}, True, lambda: pytest.fail("--json prints no lines"), tmp_path / "x.json")
    out, err = capsys.readouterr()
    assert json.loads((tmp_path / "x.json").read_text())["data"] == json.loads(out)["data"] == {"a": 1}
    assert err == ""


def test_without_json_lines_are_printed(capsys):
    """Without json lines are printed and no object."""
    deliver({"a": 1}, False, lambda: say("figures"), None)
    assert capsys.readouterr() == ("figures\n", "")


def test_failed_picture_costs_no_figures(tmp_path, capsys):
    """The figures are saved and printed all the same, and so is every other picture."""
    written = []

    def fail():
        raise ConfigError("no matplotlib", hint="install it")

    with pytest.raises(typer.Exit) as caught:
        deliver({"a": 1}, False, lambda: say("figures"), tmp_path / "x.json", fail, lambda: written.append(1))
    out, err = capsys.readouterr()
    assert (caught.value.exit_code, out) == (3, "figures\n")
    assert err == "error: no matplotlib\nhint: install it\n"
    assert written == [1]
    assert (tmp_path / "x.json").exists()


def test_a_mistake_of_our_own_is_not_hidden():
    def fail():
        raise KeyError("bug")

    with pytest.raises(KeyError):
        deliver({}, True, lambda: None, None, fail)


def test_unknown_broker_is_refused():
    """A broker that is not known is refused with those that are."""
    assert [broker_name(name) for name in ("auto", "mosquitto", "amqtt")] == ["auto", "mosquitto", "amqtt"]
    with pytest.raises(UsageError, match="no broker 'emqx'") as caught:
        broker_name("emqx")
    assert caught.value.hint == "use auto, mosquitto or amqtt"


def test_missing_folder_names_its_option(tmp_path):
    """A file in no folder is refused with its option."""
    option = types.SimpleNamespace(opts=["--save"])
    assert writable(option, None) is None
    assert writable(option, tmp_path / "x.json") == tmp_path / "x.json"
    with pytest.raises(UsageError, match=f"there is no folder {tmp_path}/none for --save"):
        writable(option, tmp_path / "none" / "x.json")
    assert list(tmp_path.iterdir()) == [], "the check leaves no file"


def test_sigterm_ends_program_as_ctrl_c_does():
    """So every process that it started is ended."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        stop_cleanly()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)
