"""The demo's JSON object, and how it waits for its processes."""

from __future__ import annotations

import dataclasses
import json
import types

import pytest

pytest.importorskip("torch")

from shoal.demo import runner
from shoal.demo.runner import LOOK_ROUND, OPTIONS, plan_seed
from shoal.protocol.documents import RunPlan
from shoal.protocol.recipe import Recipe
from shoal.simulation.process_fleet import StageError
from tests.helpers.demos import made
from tests.helpers.plans import run_plan

pytestmark = pytest.mark.torch


INTERFACE = {
    "broker": None,
    "devices": None,
    "groups": None,
    "runs": [
        dict.fromkeys(
            (
                "algorithm",
                "accuracy",
                "ari",
                "clusters",
                "rounds",
                "seconds_per_round",
                "bytes_up_per_device_round",
                "bytes_down_per_device_round",
                "mode",
            )
        )
    ],
    "device": {"rss_mb_max": None, "torch_loaded": None},
    "aggregator": {"rss_mb_max": None},
    "seen": dict.fromkeys(("cosine", "share_in_place", "reading_psnr_db_masked", "reading_psnr_db_none")),
}


def shape(value):
    """Return the keys of a document, with None in place of every figure."""
    if isinstance(value, dict):
        return {k: shape(v) for k, v in value.items()}
    return [shape(value[0])] if isinstance(value, list) else None


def test_json_object_is_the_fixed_interface():
    """Programs read it."""
    data = made(8).data()
    assert shape(data) == INTERFACE
    assert [shape(r) for r in data["runs"]] == INTERFACE["runs"] * 3
    assert json.loads(json.dumps(data, allow_nan=False)) == data
    assert (data["broker"], data["devices"], data["groups"]) == ("mosquitto", 20, 4)
    assert data["runs"][1] == {
        "algorithm": "cfl",
        "accuracy": 92.5,
        "ari": 1.0,
        "clusters": 4,
        "rounds": 60,
        "seconds_per_round": 0.2345,
        "bytes_up_per_device_round": 20123.0,
        "bytes_down_per_device_round": 22321.0,
        "mode": "rotation",
    }
    assert data["device"] == {"rss_mb_max": 71.6, "torch_loaded": False}
    assert data["aggregator"] == {"rss_mb_max": 301.4}
    assert data["seen"] == {
        "cosine": 0.0312,
        "share_in_place": 0.0145,
        "reading_psnr_db_masked": 7.25,
        "reading_psnr_db_none": 120.0,
    }


def test_plans_seed_hints_at_no_origins():
    """The aggregator reads the plan; the origins follow from the demo's seed itself."""
    seeds = [plan_seed(seed) for seed in range(100)]
    assert seeds == [plan_seed(seed) for seed in range(100)]
    assert len(set(seeds)) == 100
    assert not any(seed == number for number, seed in enumerate(seeds))
    assert all(0 <= seed < 2**32 for seed in seeds)


def test_three_runs_train_alike():
    """Their accuracies are compared."""
    assert [options.algorithm for options in OPTIONS] == ["fedavg", "cfl", "ifca"]
    assert len({options.local for options in OPTIONS}) == 1
    own = {"algorithm", "settings", "rounds", "local"}
    for options in OPTIONS:
        for field in dataclasses.fields(Recipe):
            assert field.name in own or getattr(options, field.name) == field.default


class Clock:
    """Virtual time, which only `sleep` advances."""

    def __init__(self):
        self.now_s = 0.0

    def monotonic(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    monkeypatch.setattr(runner, "time", made)
    return made


class Stage:
    """A stage on which one round closes at each poll."""

    def __init__(self, folder, rounds):
        self.aggregator_dir, self.rounds, self.closed, self.checks = folder, rounds, 0, 0
        self.programs = {"aggregator": types.SimpleNamespace(tail=lambda: "round 2: 18 of 19")}

    def finished(self, run):
        assert run == 1
        self.closed += 1
        return self.closed > self.rounds

    def check(self):
        self.checks += 1

    def records(self, _run):
        return [{"round": n} for n in range(1, min(self.closed, self.rounds) + 1)]


class Progress:
    def __init__(self):
        self.seen = []

    def round(self, algorithm, done, total, record):
        self.seen.append((algorithm, done, total, record and record["round"]))


def watch(stage, plan: RunPlan):
    progress = Progress()
    records, view = runner._watch(stage, plan, progress)
    return records, view, progress.seen


def test_watching_takes_the_last_update(clock, tmp_path, monkeypatch):
    """The files of a closed round are removed, so a look may find none."""
    looks = []

    def look(folder, length):
        assert (folder, length) == (tmp_path / "run-000001", 6)
        looks.append(stage.closed)
        return None if stage.closed == 8 else f"update of poll {stage.closed}"

    monkeypatch.setattr(runner, "stored_update", look)
    stage = Stage(tmp_path, 8)
    records, view, seen = watch(stage, run_plan(rounds=7))
    assert [r["round"] for r in records] == list(range(1, 9))
    assert looks == list(range(LOOK_ROUND, 9)), "not before the round from which the demo looks"
    assert view == "update of poll 7"
    assert seen == [("fedavg", n, 8, n) for n in range(1, 9)] + [("fedavg", 8, 8, 8)]
    assert stage.checks == 8


def test_watching_gives_up_after_its_time(clock, tmp_path, monkeypatch):
    """Watching gives up after its time and says how long that was."""
    monkeypatch.setattr(runner, "stored_update", lambda *_: None)
    monkeypatch.setattr(runner, "RUN_TIMEOUT_S", 5.0)
    stage = Stage(tmp_path, 10**9)
    with pytest.raises(StageError, match=r"run 1 did not finish in 5 s\nround 2: 18 of 19") as error:
        watch(stage, run_plan())
    assert "mosquitto" in error.value.hint
    assert 5.0 <= clock.now_s < 5.5


def device_stage(statuses, check=lambda: None):
    left = iter(statuses)
    return types.SimpleNamespace(device_status=lambda _name: next(left), check=check)


def test_figures_are_read_once_written(clock):
    """A devices figures are read once it has written them."""
    figures = {"rounds": 3, "bytes_up": 7, "bytes_down": 9}
    stage = device_stage([{}, {"ended": {"2": {}}}, {"ended": {"1": figures}}])
    found = runner._ended(stage, "dev-1", 1)
    assert found == figures
    assert found is not figures


def test_device_without_figures_is_named(clock):
    """A device that writes no figures is named."""
    endless = iter(dict, None)
    with pytest.raises(TimeoutError, match="dev-1 did not report the end of run 1"):
        runner._ended(device_stage(endless), "dev-1", 1)
    assert clock.now_s >= runner.STATUS_WAIT_S


def test_ended_device_is_reported(clock):
    """Its log says more than a missing figure."""

    def check():
        raise RuntimeError("dev-1 ended with status 3")

    with pytest.raises(RuntimeError, match="ended with status 3"):
        runner._ended(device_stage(iter(dict, None), check), "dev-1", 1)
