"""Today's programs beside programs of other versions, all real processes."""

import json

import pytest
from typer.testing import CliRunner

from shoal.owner.cli.main import app
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.transport.local_broker import find_mosquitto
from shoal.version import VERSION, WIRE
from tests.helpers.forked_stages import begin
from tests.helpers.waiting import until
from tests.integration.other_versions import mixed_stage

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
NAMES = ("dev-0", "dev-1", "dev-2")
OPTIONS = Recipe(
    "cfl",
    rounds=4,
    local=LocalTraining(epochs=1, batch_size=16, lr=0.2),
    min_contributors=2,
    quorum=1.0,
    deadline_s=60.0,
    seed=1,
)
WITHIN_S = 120.0
LATER = {"later": True}
REFUSALS = ("refused", "Traceback", "malformed", "not known")
"""Words of a program that could not read a message."""


def start(stage):
    """Start all programs, and a run."""
    stage.start_aggregator("--log", "debug")
    for name in NAMES:
        stage.start_device(name, stage.root.parent / f"{name}.npz", "--log", "debug")
    return begin(stage, OPTIONS).run


def status(stage):
    """Return the data of `shoal-fleet status`, asked through the broker by today's program."""
    done = CliRunner().invoke(app, ["status", str(stage.fleet.path), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["data"]


def test_programs_skip_later_additions(tmp_path):
    """Fields in each message that a program signs, and messages of an optional kind, in both directions; none is blamed."""
    with mixed_stage(tmp_path, {"aggregator": LATER, "dev-0": LATER}, NAMES) as stage:
        records = stage.wait(start(stage), WITHIN_S)
        assert [record["contributed"] for record in records] == [len(NAMES)] * (OPTIONS.rounds + 1)
        assert records[-1]["loss"] < 0.7 * records[0]["loss"], "the models have learned"
        found = status(stage)
        assert found["version"] == "99.0.0"
        told = {d["name"]: (d["version"], d["version_state"], d["reason"]) for d in found["devices"]}
        assert told == {"dev-0": ("99.0.0", "same", "")} | dict.fromkeys(NAMES[1:], (VERSION, "older", ""))
        for name in ("aggregator", *NAMES):
            log = stage.log(name)
            assert "optional kind 200" in log, "sent, and skipped"
            assert not any(word in log for word in REFUSALS), log


def test_other_wire_version_is_left_out(tmp_path):
    """An earlier and a later one: each says in its log what it lacks, and the status why the run waits for it."""
    software = {"dev-0": {"wire": WIRE - 1}, "dev-2": {"wire": WIRE + 1}}
    with mixed_stage(tmp_path, software, NAMES) as stage:
        run = start(stage)
        for name, hint in (("dev-0", "upgrade Shoal on this machine"), ("dev-2", "upgrade the owner's program")):
            until(lambda name=name: f"a run in wire version {WIRE}" in stage.log(name), "it reads the plan", WITHIN_S)
            assert f"this software (shoal 99.0.0) speaks {software[name]['wire']}" in stage.log(name)
            assert hint in stage.log(name)
        until(lambda: all(status(stage)["devices"][i]["reason"] for i in (0, 2)), "the reasons", WITHIN_S)
        earlier, today, later = status(stage)["devices"]
        words = "its software (shoal 99.0.0, wire {}) does not speak wire version {} of the run"
        assert [d["reason"] for d in (earlier, later)] == [words.format(v, WIRE) for v in (WIRE - 1, WIRE + 1)]
        assert earlier["advice"].startswith("upgrade Shoal on it")
        assert later["advice"].startswith("upgrade the owner's program and the aggregator")
        assert not today["reason"]
        assert not stage.finished(run)
