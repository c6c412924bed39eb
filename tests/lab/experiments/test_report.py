"""Terminal output of `shoal simulate`: progress, and the table of results with the details below it."""

from __future__ import annotations

import sys

import pytest
from shoal_lab.experiments.report import progress_of, report


@pytest.mark.parametrize(("rank", "terminal", "bars"), [(0, True, True), (1, True, False), (0, False, False)])
def test_progress_is_for_terminals(monkeypatch, capsys, rank, terminal, bars):
    # The class, since pytest replaces the stream between a fixture and its test.
    monkeypatch.setattr(type(sys.stderr), "isatty", lambda _: terminal)
    with progress_of(rank) as progress:
        progress.stage("reading mnist")
        progress.round("ifca", 1, 1, {"round": 1, "accuracy": 51.2345, "sizes": (1, 2), "clusters": 2, "purity": None})
    out, err = capsys.readouterr()
    assert out == ""
    assert ("reading mnist" in err and "accuracy 51.23, clusters 2" in err) is bars
    assert bars or not err


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


def test_unmeasured_figures_are_dashes(capsys):
    _, row = lines_of(capsys, result(accuracy=None, published=None, purity=None, ari=None))
    assert row.split() == ["ifca", "-", "-", "-", "-", "-", "4", "30", "0.123"]


def test_other_figures_stand_below_the_table(capsys):
    """Short ones only; several published figures are no column."""
    extra = {
        "gap": 0.123456,
        "right": True,
        "seen": [1, 2],
        "long": list(range(61)),
        "nested": {"a": {"b": 1}},
        "none": None,
        "fits": {"a": 1, "b": 2.55555},
    }
    _, row, *rest = lines_of(capsys, result(published={"cfl": 36.0, "from": "Fig. 9"}, **extra))
    assert row.split()[3] == "-"
    assert rest == [
        "",
        "ifca:",
        "  published: cfl 36, from Fig. 9",
        "  gap: 0.1235",
        "  right: True",
        "  seen: 1, 2",
        "  fits: a 1, b 2.556",
    ]


def test_a_switch_is_no_published_number(capsys):
    _, row, *rest = lines_of(capsys, result(published=True))
    assert row.split()[3] == "-"
    assert rest[-1] == "  published: True"


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
