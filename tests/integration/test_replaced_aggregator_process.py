"""The server burns with the aggregator's directory while a run is under way, as real programs: it is replaced, or restored."""

from __future__ import annotations

import shutil
import signal
from contextlib import contextmanager

import numpy as np
import pytest

from aggregator.membership import AggregatorMembership
from aggregator.storage.store import read_last_record
from aggregator.strategies.registry import settings_of
from edge_client.membership import DeviceMembership
from edge_client.models.store import FOLDER, stored_certificate
from edge_client.storage.state import DeviceState
from shoal.errors import UntrustedError
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.models.files import read_certified
from shoal.owner.runs.plan import chosen_origins, make_plan, write_run
from shoal.protocol.recipe import Recipe
from shoal.transport.local_broker import find_mosquitto
from tests.helpers import calls, waiting
from tests.helpers.forked_stages import (
    begin,
    stage_of,
)
from tests.helpers.run_places import LONG_RUN, SLOWLY
from tests.helpers.tasks import logistic_bundle

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(400),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
WAIT_S = 120.0
OFF = "dev-01"


class Scene:
    """A fleet of real programs, and the owner's commands."""

    def __init__(self, root, stage):
        self.root, self.stage = root, stage

    def until(self, reached, name="aggregator"):
        waiting.until(reached, lambda: self.stage.log_of(name).read_text()[-3000:], WAIT_S, 0.1)

    def call(self, program, *arguments, status=0):
        done = calls.call(program, list(map(str, arguments)), self.root, {}, "")
        assert done.status == status, done.out + done.err
        return done.out + done.err

    def start_device(self, name):
        return self.stage.start_device(name, self.root / f"{name}.npz")

    def roster_of(self, name):
        return DeviceMembership(self.stage.device_dir(name)).roster

    def sign(self, rounds, certified):
        """Let the owner sign a run that begins with a device's certified model, and return its number."""
        fleet = FleetDirectory(self.stage.fleet.path)
        bundle = logistic_bundle()
        options = Recipe("fedavg", rounds=rounds, local=LONG_RUN.local, min_contributors=1, quorum=0.5, deadline_s=2.0)
        plan = make_plan(fleet, bundle, options)
        _, round_, models = read_certified(certified, bundle, fleet)
        assert round_ >= 1
        assert np.any(models[0])
        write_run(fleet, plan, bundle, chosen_origins(models, settings_of("fedavg", {}), None))
        return plan.run


@contextmanager
def burning(tmp_path, count):
    """Yield the scene, the devices' names and the number of the run, which is in its first rounds; OFF is off."""
    names = tuple(f"dev-{i:02d}" for i in range(count))
    with stage_of(tmp_path, names, environment=SLOWLY) as (stage, _):
        scene = Scene(tmp_path, stage)
        first = begin(stage, LONG_RUN).run
        stage.start_aggregator()
        for name in names:
            scene.start_device(name)
        scene.until(lambda: stage.closed(first) >= 1)
        stage.stop(OFF)
        yield scene, names, first


def all_end_with_one_model(scene, names, run):
    """Start the device that was off, wait for the end of the run, and compare the models of the others."""
    online = [name for name in names if name != OFF]
    scene.start_device(OFF)
    owner = FleetDirectory(scene.stage.fleet.path)
    scene.until(lambda: scene.roster_of(OFF).aggregator == owner.roster.aggregator, OFF)
    directory = scene.stage.aggregator_dir / f"run-{run:06d}"
    scene.until(lambda: (read_last_record(directory) or {}).get("final"))
    scene.until(lambda: all(DeviceState(scene.stage.device_dir(n)).load_model().run == run for n in online))
    thetas = {DeviceState(scene.stage.device_dir(n)).load_model().theta.tobytes() for n in online}
    assert len(thetas) == 1


@pytest.mark.parametrize("count", [4, pytest.param(20, marks=pytest.mark.long)])
def test_fleet_goes_on_with_the_new_one(tmp_path, count):
    """The fleet goes on with another aggregator."""
    with burning(tmp_path, count) as (scene, names, first):
        stage, owner, server = scene.stage, scene.stage.fleet.path, scene.stage.aggregator_dir
        scene.until(lambda: stage.closed(first) >= 3)
        online = [name for name in names if name != OFF]
        scene.until(lambda: stored_certificate(stage.device_dir(online[0]) / FOLDER).statements)
        stage.stop("aggregator", signal.SIGKILL)
        shutil.copytree(server, tmp_path / "old")
        shutil.rmtree(server)
        scene.call("shoal-aggregator", "init", server)
        said = scene.call("shoal-fleet", "add-aggregator", owner, server / "aggregator.card", status=3)
        assert "replace-aggregator" in said
        said = scene.call("shoal-fleet", "replace-aggregator", owner, server / "aggregator.card")
        assert "shoal-aggregator join" in said
        assert FleetDirectory(owner).roster.sequence == stage.fleet.roster.sequence + 1
        fleet = FleetDirectory(owner)
        grant = owner / "grants" / "aggregator.grant"
        scene.call("shoal-aggregator", "join", server, grant, "--owner", fleet.fingerprint)
        new = stage.start_aggregator()
        # Before any run: the new aggregator has said who it is.
        scene.until(lambda: all(scene.roster_of(n).aggregator == fleet.roster.aggregator for n in online))
        for name in online:
            model = DeviceState(stage.device_dir(name)).load_model()
            assert (model.run, model.round >= 1) == (first, True)

        scene.call("shoal-edge", "export", stage.device_dir(online[0]), tmp_path / "certified", "--certified")
        run = scene.sign(rounds=6, certified=tmp_path / "certified")
        scene.call("shoal-fleet", "run", "start", owner, "--run", run)
        scene.until(lambda: stage.closed(run) >= 1)

        old = stage._start("old", "aggregator", ["serve", str(tmp_path / "old")])
        assert old.process.wait(WAIT_S) == UntrustedError.exit_code == 6, old.log.read_text()[-3000:]
        assert "does not name this aggregator" in old.log.read_text()
        assert "shoal-fleet replace-aggregator" in old.log.read_text()
        stage.stop("old")
        all_end_with_one_model(scene, names, run)
        assert new.process.poll() is None


@pytest.mark.parametrize("count", [pytest.param(20, marks=pytest.mark.long)])
def test_the_fleet_goes_on_with_a_backup(tmp_path, count):
    """It was made in mid-run, before a device was revoked; the restored aggregator sees the owner's roster first."""
    with burning(tmp_path, count) as (scene, names, first):
        stage, owner, server = scene.stage, scene.stage.fleet.path, scene.stage.aggregator_dir
        revoked = names[-1]
        scene.call("shoal-aggregator", "backup", server, tmp_path / "backup")
        scene.call("shoal-fleet", "revoke", owner, revoked)
        closed = stage.closed(first)
        scene.until(lambda: stage.closed(first) >= closed + 3)
        scene.call("shoal-aggregator", "restore", server, tmp_path / "backup", status=6)
        stage.stop("aggregator", signal.SIGKILL)
        shutil.rmtree(server)
        scene.call("shoal-aggregator", "restore", server, tmp_path / "backup")
        new = stage.start_aggregator()
        fleet = FleetDirectory(owner)
        scene.until(lambda: AggregatorMembership(server).roster == fleet.roster)
        assert "the roster is" in scene.call("shoal-aggregator", "doctor", server)

        # The lost run once more: no device does its rounds again, none is blamed, and it ends when the owner stops it.
        online = [name for name in names if name not in (OFF, revoked)]
        scene.call("shoal-fleet", "run", "start", owner, "--run", first)
        scene.until(lambda: "another history" in scene.call("shoal-aggregator", "status", server))
        assert "online, but" not in scene.call("shoal-aggregator", "status", server)
        scene.call("shoal-fleet", "run", "stop", owner, first, "--now")
        scene.until(lambda: not list((server / "runs").iterdir()))
        scene.call("shoal-edge", "export", stage.device_dir(online[0]), tmp_path / "certified", "--certified")
        run = scene.sign(rounds=6, certified=tmp_path / "certified")
        scene.call("shoal-fleet", "run", "start", owner, "--run", run)
        scene.until(lambda: stage.closed(run) >= 1)
        all_end_with_one_model(scene, [*online, OFF], run)
        assert new.process.poll() is None
        assert scene.roster_of(online[0]) == fleet.roster
