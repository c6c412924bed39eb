"""Saved results name their command, commit and machine."""

import json
import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from shoal.errors import IntegrityError
from shoal.report import record


def test_figures_have_their_origin(tmp_path, monkeypatch):
    """Figures are kept with command commit and machine."""
    monkeypatch.setattr("sys.argv", ["/somewhere/shoal", "bench", "round", "--devices", "2"])
    record.save(tmp_path / "round.json", {"seconds": 0.5})
    kept = json.loads((tmp_path / "round.json").read_text())
    assert kept["data"] == {"seconds": 0.5}
    assert kept["command"] == ["shoal", "bench", "round", "--devices", "2"]
    assert re.fullmatch(r"[0-9a-f]{40}\+?|unknown", kept["commit"])
    assert kept["machine"]["cores"] >= 1
    assert set(kept) == {"command", "commit", "date", "machine", "data"}


WHOLE = {"machine": {"cpu": "A CPU", "libraries": {"numpy": "2.0"}}, "commit": "a" * 40}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ()),
        ({"commit": "a" * 40 + "+"}, ("commit",)),
        ({"commit": "unknown"}, ("commit",)),
        ({"machine": {"cpu": "A CPU"}}, ("libraries",)),
        ({"machine": {"libraries": {"numpy": "2.0"}, "cpu": ""}}, ("cpu",)),
        ({"machine": {}, "commit": ""}, ("cpu", "libraries", "commit")),
    ],
)
def test_what_a_result_lacks_is_named(changes, expected):
    assert record.lacking({**WHOLE, **changes}) == expected


def test_result_lacks_only_a_clean_commit(tmp_path):
    """A result saved here lacks no more than a clean commit."""
    record.save(tmp_path / "one.json", {})
    assert set(record.lacking(json.loads((tmp_path / "one.json").read_text()))) <= {"commit"}


def history(count):
    return [{"round": i + 1, "loss": 1 / (i + 3), "accuracy": None if i % 2 else 0.5} for i in range(count)]


def test_file_keeps_other_runs_lines(tmp_path):
    """A file of lines keeps other runs and replaces the same."""
    file = tmp_path / "toys.jsonl"
    for seed, accuracy in (("0", 1.0), ("1", 2.0), ("0", 3.0)):
        record.save(
            file, {"accuracy": accuracy}, command=["shoal", "simulate", "x", "--seed", seed, "--save", str(file)]
        )
    record.save(file, {"accuracy": 4.0}, command=["make", "long"], name="kill")
    record.save(file, {"accuracy": 5.0}, command=["make", "long"], name="soak")
    runs = [(record.key_of(run)[-1], run["data"]["accuracy"]) for run in record.read_lines(file)]
    assert runs == [("0", 3.0), ("1", 2.0), ("kill", 4.0), ("soak", 5.0)]
    assert file.read_text().count("\n") == 4
    assert [found for found, _ in record.load(tmp_path)] == [file] * 4


@pytest.mark.parametrize("count", [0, 1, record.MOST_POINTS, record.MOST_POINTS + 1, 1000])
def test_line_has_a_thinned_history(tmp_path, count):
    """A line has a thinned history and all other figures."""
    file, rows = tmp_path / "toys.jsonl", history(count)
    data = {"accuracy": 1 / 3, "results": [{"history": rows, "by_device": [0.1234567]}]}
    for _ in range(2):
        record.save(file, data, command=["x"])
    (run,) = record.read_lines(file)
    (kept,) = run["data"].pop("results")
    assert run["data"] == {"accuracy": 1 / 3}
    assert kept["by_device"] == [0.1234567]
    assert len(kept["history"]) == min(count, record.MOST_POINTS)
    by_round = {row["round"]: row for row in rows}
    for row in kept["history"]:
        assert row == {**by_round[row["round"]], "loss": pytest.approx(by_round[row["round"]]["loss"], rel=1e-3)}
    assert [row["round"] for row in kept["history"]][:1] == [1][:count]
    assert [row["round"] for row in kept["history"]][-1:] == [count][:count]


def test_line_has_rounded_splits(tmp_path):
    record.save(tmp_path / "cfl.jsonl", {"splits": [{"round": 21, "p": [0.123456, None]}, 7]}, command=["x"])
    assert record.read_lines(tmp_path / "cfl.jsonl")[0]["data"]["splits"] == [{"round": 21, "p": [0.1235, None]}, 7]


def test_line_has_thinned_panels(tmp_path):
    """The lines of a panel are thinned and rounded, and its dots all stay."""
    lines = [{"label": str(dots), "x": [*range(1000)], "y": [1 / 7] * 1000, "dots": dots} for dots in (False, True)]
    record.save(tmp_path / "toys.jsonl", {"panels": [{"title": "one", "lines": lines}]}, command=["x"])
    ((path, points),) = (panel["lines"] for panel in record.read_lines(tmp_path / "toys.jsonl")[0]["data"]["panels"])
    assert (len(path["x"]), path["x"][0], path["x"][-1], path["y"]) == (record.MOST_POINTS, 0, 999, [0.1429] * 20)
    assert points == {**lines[1], "y": [0.1429] * 1000}


@pytest.mark.parametrize("line", ["", "{", "[]", "{}", "3", '{"command": ["x"], "data": {"history": 3}}'])
def test_damaged_line_loses_nothing(tmp_path, line):
    """A damaged line is named and nothing is lost."""
    file = tmp_path / "toys.jsonl"
    record.save(file, {}, command=["x"])
    text = file.read_text() + line + "\n"
    file.write_text(text)
    with pytest.raises(IntegrityError, match="line 2 of "):
        record.save(file, {}, command=["y"])
    assert file.read_text() == text


@pytest.mark.slow
def test_programs_at_once_lose_no_line(tmp_path):
    """Programs that save at once lose no line."""
    file = tmp_path / "toys.jsonl"
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda i: record.save(file, {}, command=["x", str(i)]), range(24)))
    assert {record.key_of(run)[1] for run in record.read_lines(file)} == {str(i) for i in range(24)}
