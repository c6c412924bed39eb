"""`shoal`: figures that are printed even if they can't be saved, names that are refused early, and the lines of reports."""

from __future__ import annotations

import dataclasses
import json
import signal
import sys
import types

import pytest
import typer

pytest.importorskip("torch")

from shoal import cli
from shoal.cli import _broker, _deliver, _model, _stop_cleanly
from shoal.errors import ConfigError, UsageError
from shoal.page.history import RunHistory, history_of
from shoal.util.console import say
from tests.helpers.demos import made
from tests.helpers.pages import names, record


@pytest.mark.parametrize("as_json", [False, True])
def test_figures_that_can_not_be_saved_are_printed_nevertheless(tmp_path, capsys, as_json):
    with pytest.raises(typer.Exit) as caught:
        _deliver({"a": 1}, as_json, lambda: say("figures"), tmp_path / "none" / "x.json")
    out, err = capsys.readouterr()
    assert caught.value.exit_code == 3
    assert (json.loads(out)["data"] == {"a": 1}) if as_json else (out == "figures\n")
    assert "error: can't write" in err


def test_saved_figures_are_those_that_are_printed(tmp_path, capsys):
    _deliver({"a": 1}, True, lambda: pytest.fail("--json prints no lines"), tmp_path / "x.json")
    out, err = capsys.readouterr()
    assert json.loads((tmp_path / "x.json").read_text())["data"] == json.loads(out)["data"] == {"a": 1}
    assert err == ""


def test_without_json_lines_are_printed_and_no_object(capsys):
    _deliver({"a": 1}, False, lambda: say("figures"), None)
    assert capsys.readouterr() == ("figures\n", "")


def test_a_picture_that_fails_costs_no_figures_and_its_error_is_the_exit_status(tmp_path, capsys):
    """The figures are saved and printed all the same, and so is every other picture."""
    written = []

    def fail():
        raise ConfigError("no matplotlib", hint="install it")

    with pytest.raises(typer.Exit) as caught:
        _deliver({"a": 1}, False, lambda: say("figures"), tmp_path / "x.json", fail, lambda: written.append(1))
    out, err = capsys.readouterr()
    assert (caught.value.exit_code, out) == (3, "figures\n")
    assert err == "error: no matplotlib\nhint: install it\n"
    assert written == [1]
    assert (tmp_path / "x.json").exists()


def test_a_mistake_of_our_own_is_not_hidden():
    def fail():
        raise KeyError("bug")

    with pytest.raises(KeyError):
        _deliver({}, True, lambda: None, None, fail)


@pytest.mark.parametrize(
    ("check", "names", "message", "hint"),
    [
        (_broker, ("auto", "mosquitto", "amqtt"), "no broker 'emqx'", "use auto, mosquitto or amqtt"),
        (_model, ("logistic", "mlp"), "no model 'emqx'", "use logistic or mlp"),
    ],
)
def test_a_name_that_is_not_known_is_refused_with_those_that_are(check, names, message, hint):
    assert [check(name) for name in names] == list(names)
    with pytest.raises(UsageError) as caught:
        check("emqx")
    assert (str(caught.value), caught.value.hint) == (message, hint)


def test_a_file_in_no_folder_is_refused_with_its_option(tmp_path):
    option = types.SimpleNamespace(opts=["--save"])
    assert cli._writable(option, None) is None
    assert cli._writable(option, tmp_path / "x.json") == tmp_path / "x.json"
    with pytest.raises(UsageError, match=f"there is no folder {tmp_path}/none for --save"):
        cli._writable(option, tmp_path / "none" / "x.json")
    assert list(tmp_path.iterdir()) == [], "the check leaves no file"


def test_sigterm_ends_the_program_as_ctrl_c_does():
    """So every process that it started is ended."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        _stop_cleanly()
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGTERM)
    finally:
        signal.signal(signal.SIGTERM, before)


ROUND = {
    "seconds_per_round_median": 0.1234,
    "seconds_per_round_min": 0.1,
    "seconds_per_round_max": 0.2,
    "rounds": 20,
    "devices": 1,
    "broker": "amqtt",
    "mode": "permutation",
    "bound_ratio": 2.34,
    "seconds_training_alone": 0.0105,
    "cores": 2,
    "model_bytes": 636_040,
    "device_rss_mb_max": 71.6,
    "aggregator_rss_mb_max": 120.2,
}


def test_the_lines_of_a_round(capsys):
    cli._show_round(ROUND)
    assert capsys.readouterr().out.splitlines() == [
        "0.123 s a round (median of 20, 0.100 to 0.200), 1 device on amqtt, mask permutation",
        "2.3 times what the gradient steps alone take here: 1 x 10.5 ms on 2 cores",
        "model 636040 bytes; peak memory: device 72 MB, aggregator 120 MB",
    ]


def test_the_lines_of_a_load(capsys):
    cli._show_load(
        {
            "devices": 10,
            "algorithm": "ifca",
            "model_bytes": 31_400,
            "rounds": 1,
            "seconds_per_round_median": 0.5,
            "aggregator_cpu_ms_per_upload": 1.234,
            "aggregator_rss_mb_max": 50.4,
            "open_files_max": 30,
            "broker_cpu_s_per_round": 0.01,
            "main_thread_cpu_ms_per_upload": 0.456,
            "others_cpu_share": 0.29,
            "uploads_per_s_median": 480.4,
            "uploads_counted": 19,
            "uploads_expected": 20,
            "nacks": 1,
            "reminders": 0,
        }
    )
    assert capsys.readouterr().out.splitlines() == [
        "10 devices, ifca, model of 31400 bytes, 1 round: 0.500 s a round (median)",
        "aggregator: 1.23 ms of CPU an upload, peak 50 MB, 30 open files; broker: 0.010 s of CPU a round",
        "its main thread: 0.46 ms of CPU an upload; broker and devices took 29 % of all CPU time",
        "480 uploads a second from the first one to the last answer (median)",
        "uploads: 19 counted of 20; 1 NACK, 0 reminders",
    ]


def test_the_lines_of_a_soak_say_which_figure_rises(capsys):
    figures = {"first_third": {"rss_mb": 50.0, "open_files": 9.0}, "last_third": {"rss_mb": 90.0, "open_files": 9.0}}
    counts = {"devices": 1, "minutes": 2.0, "rounds": 100, "nacks": 0, "reminders": 2}
    cli._show_soak({**figures, **counts, "flat": {"rss_mb": False, "open_files": True}})
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert " ".join(lines[0]) == "1 device, 2.0 minutes, 100 rounds; 0 NACKs, 2 reminders"
    assert lines[2:] == [["rss_mb", "50", "90", "rises"], ["open_files", "9", "9", "flat"]]


@pytest.fixture
def loads(monkeypatch):
    """Replace the measurements of `bench aggregator`; return the fleets that are measured."""
    measured = []

    def measure(devices, algorithm):
        measured.append((devices, algorithm))
        figures = dict.fromkeys(("cpu_seconds_per_round", "cpu_ms_per_upload", "cpu_ms_per_presence"), 0.5)
        return types.SimpleNamespace(data=lambda: {"devices": devices, "published_bytes_per_round": 7, **figures})

    engine = [{"devices": 100, "us_per_presence": 1.25, "us_per_upload": 2.0}]
    monkeypatch.setitem(
        sys.modules, "shoal.bench.load.aggregator", types.SimpleNamespace(SIZES=(100, 1000), measure=measure)
    )
    monkeypatch.setitem(
        sys.modules, "shoal.bench.load.engine", types.SimpleNamespace(measure_engine=lambda _algorithm: engine)
    )
    monkeypatch.setattr(cli, "forbid_inspection", lambda: None)
    return measured


def test_the_aggregator_is_measured_at_the_usual_sizes_or_those_that_are_named(loads, capsys):
    cli.bench_aggregator()
    assert loads == [(100, "fedavg"), (1000, "fedavg")]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["devices", "100", "1000"]
    assert lines[-1].strip() == "100 devices: 1.2 us a presence, 2.0 us an upload"
    loads.clear()
    cli.bench_aggregator([5, 5], algorithm="cfl", json=True)
    assert loads == [(5, "cfl"), (5, "cfl")]
    assert json.loads(capsys.readouterr().out)["data"]["algorithm"] == "cfl"


@pytest.mark.parametrize(("arguments", "mode"), [((), "rotation"), (("--mode", "permutation"), "permutation")])
def test_a_round_is_measured_under_the_mode_that_is_asked_for(monkeypatch, capsys, arguments, mode):
    asked = []

    def measure(devices, broker, rounds, mode):
        asked.append((devices, broker, rounds, mode))
        return types.SimpleNamespace(data=lambda: {"mode": mode})

    monkeypatch.setitem(sys.modules, "shoal.bench.rounds", types.SimpleNamespace(measure=measure))
    monkeypatch.setattr(cli, "forbid_inspection", lambda: None)
    app = typer.main.get_command(cli.app)
    app.main(["bench", "round", "--devices", "3", "--broker", "amqtt", *arguments, "--json"], standalone_mode=False)
    assert asked == [(3, "amqtt", 20, mode)]
    assert json.loads(capsys.readouterr().out)["data"]["mode"] == mode


def test_a_figure_in_no_folder_is_refused_before_the_soak(tmp_path, monkeypatch):
    from shoal.bench.load import soak

    monkeypatch.setattr(soak, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(UsageError, match="/none for the figure"):
        cli.bench_soak(plot=tmp_path / "none" / "x.svg")


def test_every_command_is_there():
    app = typer.main.get_command(cli.app)
    assert set(app.commands) == {"demo", "bench", "data", "new", "simulate"}
    assert set(app.commands["bench"].commands) == {
        *("round", "start", "aggregator", "load", "soak", "numerics", "privacy", "poison", "links", "race"),
    }


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


def test_without_a_browser_the_demo_says_where_its_page_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("webbrowser.open", lambda _url: False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    cli._show_page(b"page", None, browse=True)
    said = capsys.readouterr().err
    assert "no browser can be opened here" in said
    (path,) = tmp_path.glob("shoal-demo-*/demo.html")
    assert str(path) in said
    cli._show_page(b"page", None, browse=False)
    assert len(list(tmp_path.glob("shoal-demo-*"))) == 1
