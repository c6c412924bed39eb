"""`shoal bench`: names that are refused early, and the lines of reports."""

from __future__ import annotations

import json
import sys
import types

import pytest
import typer

pytest.importorskip("torch")

from shoal_lab.bench import cli

from shoal.errors import UsageError


def test_a_model_that_is_not_known_is_refused_with_those_that_are():
    assert [cli._model(name) for name in ("logistic", "mlp")] == ["logistic", "mlp"]
    with pytest.raises(UsageError, match="no model 'emqx'") as caught:
        cli._model("emqx")
    assert caught.value.hint == "use logistic or mlp"


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
        sys.modules, "shoal_lab.bench.load.aggregator", types.SimpleNamespace(SIZES=(100, 1000), measure=measure)
    )
    monkeypatch.setitem(
        sys.modules, "shoal_lab.bench.load.engine", types.SimpleNamespace(measure_engine=lambda _algorithm: engine)
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

    monkeypatch.setitem(sys.modules, "shoal_lab.bench.rounds", types.SimpleNamespace(measure=measure))
    monkeypatch.setattr(cli, "forbid_inspection", lambda: None)
    app = typer.main.get_command(cli.app)
    app.main(["round", "--devices", "3", "--broker", "amqtt", *arguments, "--json"], standalone_mode=False)
    assert asked == [(3, "amqtt", 20, mode)]
    assert json.loads(capsys.readouterr().out)["data"]["mode"] == mode


def test_a_figure_in_no_folder_is_refused_before_the_soak(tmp_path, monkeypatch):
    from shoal_lab.bench.load import soak

    monkeypatch.setattr(soak, "measure", lambda *_: pytest.fail("measured"))
    with pytest.raises(UsageError, match="/none for the figure"):
        cli.bench_soak(plot=tmp_path / "none" / "x.svg")


def test_every_command_is_there():
    assert set(typer.main.get_command(cli.app).commands) == {
        *("round", "start", "aggregator", "load", "soak", "numerics", "privacy", "poison", "links", "race"),
    }
