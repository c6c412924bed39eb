"""`shoal bench`: its commands, names that are refused early, the delivery of a report, and the words of the benches."""

from __future__ import annotations

import json

import pytest
import typer

pytest.importorskip("torch")

from shoal_lab.bench import beside, cli, rounds, starts
from shoal_lab.bench.load import measurement, soak

from shoal.errors import ShoalError

COMMANDS = {"round", "start", "load", "soak", "numerics", "privacy", "poison", "links", "race"}
APP = typer.main.get_command(cli.app)


@pytest.fixture(autouse=True)
def _may_be_inspected(monkeypatch):
    monkeypatch.setattr(cli, "forbid_inspection", lambda: None)
    monkeypatch.setattr(cli, "stop_cleanly", lambda: None)


def run(*words):
    APP.main(list(words), standalone_mode=False)


def test_every_command_saves_and_prints_json():
    assert APP.commands.keys() == COMMANDS
    for name, command in APP.commands.items():
        assert {"save", "json"} <= {parameter.name for parameter in command.params}, name
        assert command.help, name


@pytest.mark.parametrize(("words", "mode"), [((), "rotation"), (("--mode", "permutation"), "permutation")])
def test_options_reach_bench_figures_a_file(monkeypatch, capsys, tmp_path, words, mode):
    """Options reach the bench and figures the file."""
    asked = []
    monkeypatch.setattr(rounds, "measure", lambda *given: asked.append(given) or {"mode": given[-1]})
    monkeypatch.setattr(rounds, "words", lambda data: ["a", data["mode"]])
    options = ("round", "--devices", "3", "--broker", "amqtt", *words)
    run(*options, "--save", str(tmp_path / "saved.json"))
    assert asked == [(3, "amqtt", mode)]
    assert capsys.readouterr().out.splitlines() == ["a", mode]
    assert json.loads((tmp_path / "saved.json").read_text())["data"] == {"mode": mode}
    run(*options, "--json")
    assert json.loads(capsys.readouterr().out)["data"] == {"mode": mode}


def test_a_round_beside_flower(monkeypatch, capsys):
    """Pairs are measured instead of rounds alone."""
    asked = []
    monkeypatch.setattr(beside, "measure", lambda *given, **_: asked.append(given) or {})
    monkeypatch.setattr(beside, "words", lambda _data: ["pairs"])
    run("round", "--beside", "flower", "--mode", "permutation")
    assert asked == [(10, "auto", "permutation")]
    assert capsys.readouterr().out == "pairs\n"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("load", "--devices", "1", "--model", "emqx"), "no model 'emqx'"),
        (("load", "--devices", "1", "--prepared", "--churn", "0.1"), "no devices that could leave"),
        (("soak", "--plot", "/none/x.svg"), "/none for the figure"),
        (("round", "--broker", "emqx"), "no broker 'emqx'"),
        (("round", "--beside", "fedml"), "fedml"),
        (("poison", "--attack", "x"), "no attack 'x'"),
        (("poison", "--rule", "krum"), "no rule 'krum'"),
        (("poison", "--data", "letters"), "no data 'letters'"),
        (("links", "--task", "no-such-fleet"), "no-such-fleet"),
        (("privacy", "--mode", "none", "--mode", "rot13"), "not known"),
        (("round", "--mode", "rot13"), "'rot13' is not known"),
    ],
)
def test_senseless_options_are_refused(words, message):
    with pytest.raises(ShoalError, match=message):
        run(*words)


LOAD = {
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
    "churn": 0.1,
    "uploads_fewest": 9,
    "out_of_step": 0,
}
THIRDS = {"first_third": {"rss_mb": 50.0, "open_files": 9.0}, "last_third": {"rss_mb": 90.0, "open_files": 9.0}}
SOAK = {"devices": 1, "minutes": 2.0, "rounds": 100, "nacks": 0, "reminders": 2}
ROUND = {
    **rounds.figures([0.1, 0.1234, 0.2], 0.0105, 1, 2),
    "model_bytes": 636_040,
    "broker": "amqtt",
    "mode": "permutation",
    "device_rss_mb_max": 71.6,
    "aggregator_rss_mb_max": 120.2,
}
FIRST = ((0.9, 0.8, 0.6), (0.5, 0.4, 0.3), (0.7, 0.6, 0.4))


@pytest.mark.parametrize(
    ("words", "data", "lines"),
    [
        (
            rounds.words,
            ROUND,
            [
                "0.123 s a round (median of 3, 0.100 to 0.200), 1 device on amqtt, mask permutation",
                "11.8 times what the gradient steps alone take here: 1 x 10.5 ms on 2 cores",
                "model 636040 bytes; peak memory: device 72 MB, aggregator 120 MB",
            ],
        ),
        (
            starts.words,
            starts.figures(FIRST, FIRST[::-1], "mosquitto"),
            [
                "fetching the run: 0.60 s to the first loss (0.40 s of CPU) (median of 3, 0.40 to 0.80)",
                "fetching the run: 0.70 s to the first update (median of 3, 0.50 to 0.90)",
                "with the run on its disk: 0.60 s to the first loss (0.40 s of CPU) (median of 3, 0.40 to 0.80)",
                "with the run on its disk: 0.70 s to the first update (median of 3, 0.50 to 0.90)",
            ],
        ),
        (
            measurement.words,
            LOAD,
            [
                "10 devices, ifca, model of 31400 bytes, 1 round: 0.500 s a round (median)",
                "aggregator: 1.23 ms of CPU an upload, peak 50 MB, 30 open files; broker: 0.010 s of CPU a round",
                "its main thread: 0.46 ms of CPU an upload; broker and devices took 29 % of all CPU time",
                "480 uploads a second from the first one to the last answer (median)",
                "uploads: 19 counted of 20; 1 NACK, 0 reminders",
                "10 % of the devices left after each round: 9 uploads in the smallest round, 0 out of step",
            ],
        ),
        (
            soak.words,
            {**THIRDS, **SOAK, "flat": {"rss_mb": False, "open_files": True}},
            [
                "1 device, 2.0 minutes, 100 rounds; 0 NACKs, 2 reminders",
                "first third last third",
                "rss_mb 50 90 rises",
                "open_files 9 9 flat",
            ],
        ),
    ],
    ids=["round", "start", "load", "soak"],
)
def test_words(words, data, lines):
    assert [" ".join(line.split()) for line in words(data)] == lines
