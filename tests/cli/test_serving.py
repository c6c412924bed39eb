"""The serving programs with wrong arguments or in a wrong directory, and a device's reports on its runs."""

from __future__ import annotations

import dataclasses
import json

import numpy as np
import pytest

from aggregator.rounds.state import RoundRecord
from aggregator.storage.store import Store
from edge_client.status import status_lines
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.runs.plan import make_plan, write_run
from shoal.owner.task_compiler.signed import read_signed
from shoal.protocol.recipe import Recipe
from shoal.util.files import exclusive

SERVING = {"shoal-edge": ["run", "--data", "d.npz"], "shoal-aggregator": ["serve"]}


@pytest.mark.parametrize("program", SERVING)
def test_nobodys_directory_is_left_alone(call, data, program):
    """Status 4. Files that look like ours stay, also in subfolders, and no lock is made."""
    (call.home / "mine/below").mkdir(parents=True)
    for name in (".thesis.tex.new", ".secret.12.new"):
        (call.home / "mine/below" / name).write_text("a draft")
    made = call(program, *SERVING[program], "mine", status=4)
    assert "error: mine belongs to no fleet" in made.err
    left = sorted(str(p.relative_to(call.home / "mine")) for p in (call.home / "mine").rglob("*"))
    assert left == ["below", "below/.secret.12.new", "below/.thesis.tex.new"]


def test_a_device_tells_of_its_runs_in_words(call, fleet):
    """One line a run; programs read the same from the JSON."""
    ended = {"1": {"run": 1, "algorithm": "cfl", "rounds": 3, "loss": 0.123456789, "path": [0, 2], "finished": True}}
    figures = {"stage": "idle", "torch_loaded": False, "rounds": 1869, "round": 2001, "ended": ended}
    (call.home / "dev-1/status.json").write_text(json.dumps(figures))
    lines = call("shoal-edge", "status", "dev-1").out.splitlines()
    assert {"stage: stopped", "last stage: idle"} <= set(lines)
    assert "rounds taken part in: 1869" in lines
    assert "last round taken part in: 2001" in lines
    assert "ended run 1: algorithm cfl, rounds taken part in 3, loss 0.1235, path 0 2" in lines
    told = call("shoal-edge", "status", "dev-1", "--json").data
    assert (told["ended"], told["rounds"], told["round"]) == (ended, 1869, 2001)


@pytest.mark.parametrize("ended", [5, ["x"], {"1": 5}, {"1": {"path": {"a": 1}}}])
def test_damaged_figures_end_nothing(ended):
    """Figures that somebody has damaged are no reason to end."""
    assert status_lines({"stage": "idle", "ended": ended})[0] == "stage: idle"


def test_status_names_what_stands_in_the_way(call, fleet):
    """Whether it serves, files that are no runs, and runs that come too late."""
    (call.home / "server/runs/000009.run").write_bytes(b"junk")
    lines = call("shoal-aggregator", "status", "server").out.splitlines()
    assert lines[0].endswith("not running")
    assert lines[1].startswith("000009.run is no run of this fleet: ")
    data = call("shoal-aggregator", "status", "server", "--json").data
    assert data["serving"] is False
    assert list(data["refused"]) == ["000009.run"]
    with exclusive(call.home / "server", wait_s=0, hint=""):
        assert call("shoal-aggregator", "status", "server", "--json").data["serving"] is True


def test_status_names_devices_held_back(call, fleet, task):
    """Also the number of rounds, and a hint."""
    owner = FleetDirectory(call.home / "owner")
    bundle, _ = read_signed(call.home / "task", owner.owner)
    plan = make_plan(owner, bundle, Recipe("fedavg", min_contributors=1))
    path = write_run(owner, plan, bundle, np.zeros((1, plan.length), np.float32))
    (call.home / "server/runs" / path.name).write_bytes(path.read_bytes())
    store = Store(call.home / f"server/run-{plan.run:06d}", plan)
    for round_ in (1, 2):
        limits = {"capped": {"dev-2": 30.0}, "refused_norm": {"dev-1": 99.0} if round_ == 2 else {}}
        record = RoundRecord(round_, False, 3, 3, (), 1.0, 0, 0, {}, {"dev-1": 0}, (), {}, **limits)
        store.record(round_, dataclasses.asdict(record))
    store.close()
    told = call("shoal-aggregator", "status", "server", "--json").data["runs"][-1]
    assert (told["capped"], told["refused_norm"]) == ({"dev-2": 2}, {"dev-1": 1})
    text = call("shoal-aggregator", "status", "server").out
    assert "left out, norm above ten times the median: dev-1 (rounds: 1)" in text
    assert "weight capped: dev-2 (rounds: 2)" in text
    assert "shoal-fleet revoke" in text
    assert "--weight-cap" in text
