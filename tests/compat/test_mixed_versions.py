"""The last release beside today's programs, in both directions, and beside programs of a version to come; all real processes."""

import dataclasses
import json
import subprocess
import sys

import numpy as np
import pytest
from typer.testing import CliRunner

from shoal.owner.cli.main import app
from shoal.owner.runs.plan import RunOptions
from shoal.task.manifest import LocalTraining
from shoal.transport.local_broker import find_mosquitto
from shoal.version import VERSION
from tests.helpers.consoles import until
from tests.helpers.mixed import RELEASED, TODAY, install, kept_wheel, mixed_stage
from tests.helpers.tasks import logistic_bundle

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.slow,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
WHEEL, LAST = kept_wheel()
NAMES = ("dev-0", "dev-1", "dev-2")
OPTIONS = RunOptions(
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


@pytest.fixture(scope="module")
def released(tmp_path_factory):
    folder = tmp_path_factory.mktemp("released")
    install(WHEEL, folder)
    return folder


@pytest.fixture
def stage_of(tmp_path, released):
    return lambda **software: mixed_stage(
        tmp_path, released, {name.replace("_", "-"): chosen for name, chosen in software.items()}, NAMES
    )


def start(stage, names=NAMES):
    stage.start_aggregator("--log", "debug")
    for name in names:
        stage.start_device(name, stage.root.parent / f"{name}.npz", "--log", "debug")


def sign(stage, **changes):
    bundle = logistic_bundle()
    return stage.add_run(bundle, np.zeros((1, bundle.length), np.float32), dataclasses.replace(OPTIONS, **changes)).run


def status(stage):
    """Return the data of `shoal-fleet status`, asked through the broker by today's program."""
    done = CliRunner().invoke(app, ["status", str(stage.fleet.path), "--json"])
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)["data"]


def states(found):
    return {device["name"]: (device["version"], device["version_state"]) for device in found["devices"]}


def trains(stage):
    """Run a fleet to the end of a run in which all devices contribute to each round."""
    run = sign(stage)
    records = stage.wait(run, WITHIN_S)
    assert [record["contributed"] for record in records] == [len(NAMES)] * (OPTIONS.rounds + 1)
    assert records[-1]["loss"] < 0.7 * records[0]["loss"], "the models have learned"
    return records


def test_the_kept_wheel_is_the_last_release_and_runs_its_own_code(released):
    """Its checksum was compared. Today's tree is another version, and the folder's programs do not import it."""
    assert LAST != VERSION
    code = "import shoal.version, edge_client, aggregator; print(shoal.version.VERSION, shoal.__file__, edge_client.__file__)"
    done = subprocess.run([sys.executable, "-c", code], cwd=released, capture_output=True, text=True, check=True)
    version, *files = done.stdout.split()
    assert version == LAST
    assert all(file.startswith(str(released)) for file in files)


def test_devices_of_the_last_release_train_with_todays_aggregator(stage_of):
    """Two of them and one of today's; status marks the two as older, and blames none."""
    with stage_of(dev_0=RELEASED, dev_1=RELEASED) as stage:
        start(stage)
        trains(stage)
        found = status(stage)
        assert states(found) == {"dev-0": (LAST, "older"), "dev-1": (LAST, "older"), "dev-2": (VERSION, "same")}
        assert (found["version"], [d["reason"] for d in found["devices"]]) == (VERSION, ["", "", ""])
        assert all("refused" not in stage.log(name) for name in ("aggregator", *NAMES))


def test_todays_devices_train_with_the_last_releases_aggregator(stage_of):
    """The owner's program is today's too: it signs the run, and reads the status of the older aggregator."""
    with stage_of(aggregator=RELEASED, dev_2=RELEASED) as stage:
        start(stage)
        trains(stage)
        found = status(stage)
        assert states(found) == {"dev-0": (VERSION, "newer"), "dev-1": (VERSION, "newer"), "dev-2": (LAST, "same")}
        assert found["version"] == LAST
        assert all("refused" not in stage.log(name) for name in ("aggregator", *NAMES))


def test_the_last_releases_devices_skip_what_a_later_aggregator_adds(stage_of):
    """Fields in each message that it signs, and messages of an optional kind."""
    with stage_of(aggregator=LATER, dev_0=RELEASED, dev_1=RELEASED, dev_2=RELEASED) as stage:
        start(stage)
        trains(stage)
        assert status(stage)["version"] == "99.0.0"
        for name in NAMES:
            log = stage.log(name)
            assert "optional kind 200" in log, "sent, and skipped"
            assert not any(word in log for word in REFUSALS), log


def test_the_last_releases_aggregator_skips_what_later_devices_add(stage_of):
    with stage_of(aggregator=RELEASED, dev_0=LATER, dev_1=LATER, dev_2=LATER) as stage:
        start(stage)
        trains(stage)
        found = status(stage)
        assert states(found) == dict.fromkeys(NAMES, ("99.0.0", "newer"))
        log = stage.log("aggregator")
        assert "optional kind 200" in log, "sent, and skipped"
        assert not any(word in log for word in REFUSALS), log


def test_a_fleet_is_upgraded_while_it_trains(stage_of):
    """First the aggregator, then each device, in the directories of the last release; one device goes back once."""
    with stage_of(aggregator=RELEASED, dev_0=RELEASED, dev_1=RELEASED, dev_2=RELEASED) as stage:
        start(stage)
        run = sign(stage, rounds=150)
        for name, software in [
            ("aggregator", TODAY),
            ("dev-0", TODAY),
            ("dev-1", TODAY),
            ("dev-0", RELEASED),
            ("dev-2", TODAY),
        ]:
            closed = len(stage.records(run))
            until(lambda closed=closed: len(stage.records(run)) > closed, "the next round", WITHIN_S)
            stage.stop(name)
            assert not stage.finished(run)
            stage.software[name] = software
            if name == "aggregator":
                stage.start_aggregator()
            else:
                stage.start_device(name, stage.root.parent / f"{name}.npz")
        records = stage.wait(run, WITHIN_S)
        assert records[-1]["contributed"] == len(NAMES)
        assert records[-1]["loss"] < 0.7 * records[0]["loss"]
        assert states(status(stage)) == {
            "dev-0": (LAST, "older"),
            "dev-1": (VERSION, "same"),
            "dev-2": (VERSION, "same"),
        }


def test_a_device_that_no_longer_speaks_the_runs_wire_version_is_left_out_and_named(stage_of):
    """It has newer software than the last release's aggregator, whose status says why the run waits for it."""
    with stage_of(aggregator=RELEASED, dev_2={"wire": [2, 3]}) as stage:
        start(stage)
        run = sign(stage)
        until(lambda: "a run in wire version 1" in stage.log("dev-2"), "dev-2 reads the plan", WITHIN_S)
        assert "this software (shoal 99.0.0) speaks 2 to 3" in stage.log("dev-2")
        until(lambda: status(stage)["devices"][2]["reason"], "the reason", WITHIN_S)
        left_out = status(stage)["devices"][2]
        assert left_out["reason"] == (
            "its software (shoal 99.0.0, wire 2 to 3) does not speak wire version 1 of the run"
        )
        assert left_out["advice"].startswith("upgrade the owner's program and the aggregator")
        assert not stage.finished(run)


def test_a_device_of_the_last_release_says_that_it_must_be_upgraded_for_a_later_run(stage_of):
    """Owner and aggregator speak wire version 2 alone; the device of the last release leaves the run alone."""
    later = {"wire": [2, 2]}
    with stage_of(aggregator=later, dev_0=RELEASED, dev_1=later, dev_2=later) as stage:
        start(stage)
        run = sign(stage, wire=2)
        until(lambda: "a run in wire version 2" in stage.log("dev-0"), "the device reads the plan", WITHIN_S)
        assert f"this software (shoal {LAST}) speaks 1" in stage.log("dev-0")
        assert "upgrade Shoal on this machine" in stage.log("dev-0")
        until(lambda: status(stage)["devices"][0]["reason"], "the reason", WITHIN_S)
        found = status(stage)["devices"][0]
        assert found["reason"] == f"its software (shoal {LAST}, wire 1) does not speak wire version 2 of the run"
        assert found["advice"].startswith("upgrade Shoal on it")
        assert not stage.finished(run)
