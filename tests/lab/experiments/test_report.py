"""Terminal output of `shoal simulate`: the line of progress, and the table of results with the details below it."""

from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
from shoal_lab.experiments import report as module
from shoal_lab.experiments.report import TerminalProgress, report

CLEAR = "\r\x1b[K"


@pytest.fixture
def clock(monkeypatch, capsys):
    """Return a clock that the progress line reads, on a terminal of 60 columns."""
    made = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module.time, "monotonic", lambda: made.now)
    # The class, since pytest replaces the stream between a fixture and its test.
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: True)
    monkeypatch.setattr(module.shutil, "get_terminal_size", lambda: os.terminal_size((60, 20)))
    return made


def test_the_time_left_is_of_one_algorithm(capsys, clock):
    """Two rounds took 4 s, so eight take 16 s; another algorithm's clock starts with it."""
    progress = TerminalProgress()
    progress.round("ifca", 0, 10, None)
    clock.now += 4
    capsys.readouterr()
    progress.round("ifca", 2, 10, None)
    assert capsys.readouterr().err == f"{CLEAR}ifca 2/10, about 16 s left"
    clock.now += 1
    progress.round("fedavg", 1, 10, None)
    assert capsys.readouterr().err == f"{CLEAR}fedavg 1/10"


def test_the_line_is_drawn_in_turns(capsys, clock):
    progress = TerminalProgress()
    progress.round("ifca", 1, 9, None)
    clock.now += 0.09
    progress.round("ifca", 2, 9, None)
    clock.now += 0.02
    progress.round("ifca", 3, 9, None)
    progress.round("ifca", 9, 9, None)
    shown = [part.split(",")[0] for part in capsys.readouterr().err.split(CLEAR)[1:]]
    assert shown == ["ifca 1/9", "ifca 3/9", "ifca 9/9"]


def test_no_terminal_no_line(capsys):
    with TerminalProgress() as progress:
        progress.stage("reading mnist")
        progress.round("ifca", 1, 1, {"accuracy": 1.0})
    assert capsys.readouterr() == ("", "")


def result(**changes):
    made = {
        "experiment": "toy",
        "algorithm": "ifca",
        "accuracy": 91.234,
        "purity": 1.0,
        "ari": 0.98765,
        "clusters": 4,
        "rounds": 30,
        "cpu_seconds_per_round": 0.12345,
        "published": 95,
        "parameters": {"lr": 0.1},
        "history": [{"round": 1}],
    }
    return {**made, **changes}


def lines_of(capsys, *results):
    report("a title", results)
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["a title", ""]
    return out[2:]


def test_the_table_has_a_row_an_algorithm(capsys):
    head, first, second = lines_of(capsys, result(), result(algorithm="a-longer-name", accuracy_last=90.5))
    assert head.split() == [
        *["algorithm", "accuracy", "last", "published", "purity", "ARI", "clusters", "rounds", "cpu"],
        "s/round",
    ]
    assert first.split() == ["ifca", "91.23", "-", "95.00", "1.000", "0.988", "4", "30", "0.123"]
    assert second.split() == ["a-longer-name", "91.23", "90.50", "95.00", "1.000", "0.988", "4", "30", "0.123"]
    for name in ("accuracy", "published", "purity", "ARI", "clusters", "rounds", "s/round"):
        end = head.index(name) + len(name)
        assert first[end - 1] != " "
        assert first[end : end + 1] in ("", " ")


def test_success_has_a_line_a_point(capsys):
    points = [{"n": 100, "R": 0.25, "probability": 0.125, "trials": 40}] * 61
    curves = {"a": {"k": 2, "line": "n", "axis": "R", "points": points}}
    *_, last = lines = lines_of(capsys, result(success=curves))
    assert last == "  curve (a), k 2, n 100, R 0.25: 12 % of 40"
    assert len([line for line in lines if "curve" in line]) == 60


def test_fleets_have_mean_and_worst_device(capsys):
    fleet = {"strategy": "cfl", "measure": "accuracy", "mean": 78.4, "worst": 22.0, "scenario": "x", "seed": 0}
    fleet |= {"personal_mean": 84.41, "personal_worst": 70.5, "standing_still": 2}
    report("a fleet", [result(algorithm="cfl", ari=0.9, clusters=2, rounds=3, **fleet)])
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["accuracy", "of", "the", "model", "personal", "finish"]
    assert lines[4].split() == ["cfl", "78.40", "22.00", "84.41", "70.50", "0.900", "2", "3"]
    assert lines[6:] == ["cfl:", "  standing_still: 2"]
