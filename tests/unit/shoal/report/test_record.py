"""Saved results name their command, commit and machine."""

import json
import re

import pytest

from shoal.report import record


def test_figures_are_kept_with_command_commit_and_machine(tmp_path, monkeypatch):
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


def test_a_result_saved_here_lacks_no_more_than_a_clean_commit(tmp_path):
    record.save(tmp_path / "one.json", {})
    assert set(record.lacking(json.loads((tmp_path / "one.json").read_text()))) <= {"commit"}
