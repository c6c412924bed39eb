"""Saved results name their command, commit and machine."""

import json
import re

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
