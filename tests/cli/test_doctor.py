"""`doctor` of owner, aggregator and device, and `status`, as a user calls them: success, a mistake, and JSON."""

from __future__ import annotations

import dataclasses
import json
import os
import time

import numpy as np
import pytest
from shoal_lab.loopback.fleet import LoopbackFleet

from aggregator.rounds.state import RoundRecord
from aggregator.status import record as aggregators
from aggregator.status.live_file import LIVE_FILE, LiveFile
from aggregator.status.watch import FleetWatch
from aggregator.storage.store import Store
from edge_client.reporting import SILENT_S
from edge_client.status import status_lines
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.runs.plan import make_plan, write_run
from shoal.owner.task_compiler.signed import read_signed
from shoal.protocol.recipe import Recipe
from shoal.transport.base import Connected
from shoal.transport.local_broker import find_mosquitto, start_broker
from shoal.util.files import exclusive
from tests.helpers.fleets import FULL_BATCH, grouped_data
from tests.helpers.tasks import logistic_bundle

PASSWORD = "hunter2-hunter2"
NAMES = {
    "shoal-aggregator": "membership directory disk roster broker tls service devices runs backup versions",
    "shoal-edge": "membership directory disk roster broker tls service clock state data versions executor",
}
WARNINGS = {"shoal-aggregator": {"service", "backup"}, "shoal-edge": {"service"}}
PLACES = {"shoal-aggregator": "server", "shoal-edge": "dev-1"}


def at(program, url):
    """Return the variable that names a program's broker."""
    return {f"{program.replace('-', '_')}_BROKER".upper(): url}


def results(data):
    return {c["name"]: c["result"] for c in data["checks"]}


@pytest.mark.broker
@pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
@pytest.mark.parametrize("program", NAMES)
def test_with_a_broker_nothing_fails(call, fleet, data, tmp_path, program):
    """Status 0, and a line each; a service that is not started and a missing backup are warnings."""
    more = ["--data", "d.npz"] if program == "shoal-edge" else []
    with start_broker("mosquitto", tmp_path / "broker") as broker:
        url = broker.url.replace("://", f"://user:{PASSWORD}@")
        told = call(program, "doctor", PLACES[program], *more, **at(program, url))
        found = call(program, "doctor", PLACES[program], *more, "--json", **at(program, url)).data
    assert f"ok       broker: {broker.url} accepts the connection, MQTT 5" in told.out
    assert PASSWORD not in told.out + told.err
    assert " ".join(results(found)) == NAMES[program]
    assert {name for name, result in results(found).items() if result != "ok"} == WARNINGS[program]
    assert {key for c in found["checks"] for key in c} == {"name", "result", "detail", "advice"}


@pytest.mark.parametrize("program", NAMES)
def test_broker_that_is_down_is_status_10(call, fleet, program):
    """In both forms, without the password of the address."""
    url = f"mqtt://user:{PASSWORD}@127.0.0.1:1"
    told = call(program, "doctor", PLACES[program], status=10, **at(program, url))
    assert "failure  broker: no MQTT broker can be used at mqtt://127.0.0.1:1" in told.out
    assert "         hint: start the broker, or check the port" in told.out
    found = call(program, "doctor", PLACES[program], "--json", status=10, **at(program, url))
    assert results(found.data)["broker"] == "failure"
    assert PASSWORD not in told.out + told.err + found.out + found.err


def test_unfit_data_of_a_run_are_found(call):
    """Data that do not fit the task of the run are found."""
    data = grouped_data(3)
    options = Recipe("fedavg", rounds=1, local=FULL_BATCH, seed=1, min_contributors=1)
    with LoopbackFleet(call.home / "fleet", logistic_bundle(6, 4), data, options) as made:
        made.run(100)
        place = made.stage.device_dir("dev-00")
    for name, columns in (("right", 6), ("wrong", 5)):
        batch = data["dev-00"]
        np.savez(call.home / f"{name}.npz", x=np.ascontiguousarray(batch.x[:, :columns]), y=batch.y)
    broker = {"status": 10, **at("shoal-edge", "mqtt://127.0.0.1:1")}
    right = call("shoal-edge", "doctor", place, "--data", "right.npz", "--json", **broker).data
    wrong = call("shoal-edge", "doctor", place, "--data", "wrong.npz", "--json", **broker).data
    assert (results(right)["data"], results(wrong)["data"], results(wrong)["state"]) == ("ok", "failure", "ok")
    (found,) = [c for c in right["checks"] if c["name"] == "data"]
    assert found["detail"] == "right.npz: 60 samples, which fit the task of run 1"


@pytest.mark.parametrize("program", NAMES)
def test_health_check_of_a_stopped_program(call, fleet, program):
    """Status 11, which containers take for unhealthy."""
    told = call(program, "status", PLACES[program], "--check", status=11)
    assert "program does not run" in told.err
    assert told.out == ""
    assert call(program, "status", PLACES[program], "--check", "--json", status=11).error["type"] == "NotReadyError"


def test_a_health_check_of_a_device(call, fleet):
    """Its program has to run, to be connected, and to have written its status file lately."""
    with exclusive(call.home / "dev-1", wait_s=0, hint=""):
        file = call.home / "dev-1/status.json"
        file.write_text(json.dumps({"stage": "idle", "connection": {"connected": False, "reason": "refused"}}))
        assert ": refused" in call("shoal-edge", "status", "dev-1", "--check", status=11).err
        file.write_text(json.dumps({"stage": "idle", "connection": {"connected": True}}))
        assert "stage: idle" in call("shoal-edge", "status", "dev-1", "--check").out
        long_ago = time.time() - SILENT_S - 1
        os.utime(file, (long_ago, long_ago))
        assert "no sign of life since" in call("shoal-edge", "status", "dev-1", "--check", status=11).err


def test_a_health_check_of_an_aggregator(call, fleet):
    """As a device's: its loop shows every few seconds that it is alive."""
    server, watch = call.home / "server", FleetWatch("mqtt://127.0.0.1")
    with exclusive(server, wait_s=0, hint=""):
        assert "not connected" in call("shoal-aggregator", "status", "server", "--check", status=11).err
        watch.connection.on_event(Connected(session_present=False))
        LiveFile(server, watch).keep_up(lambda: None, 0.0)
        assert call("shoal-aggregator", "status", "server", "--check").out
        long_ago = time.time() - aggregators.SILENT_S - 2
        os.utime(server / LIVE_FILE, (long_ago, long_ago))
        assert "no sign of life since" in call("shoal-aggregator", "status", "server", "--check", status=11).err


# -- Help --


@pytest.mark.parametrize(
    ("program", "commands"),
    [
        ("shoal-fleet", ("status", "run", "models")),
        ("shoal-fleet run", ("start", "pause", "resume", "stop", "list", "show", "logs")),
        ("shoal-aggregator", ("serve", "status")),
        ("shoal-edge", ("run", "status")),
    ],
)
def test_help_answers_to_h_in_every_program(call, program, commands):
    told = call(*program.split(), "-h")
    assert "-h, --help" in told.out
    assert [command for command in commands if f"\n  {command} " not in told.out] == []
    assert told.err == ""
    assert call(*program.split(), commands[-1], "-h").out.startswith(f"Usage: {program} {commands[-1]} ")


# -- The serving programs in a wrong directory, and a device's reports on its runs --


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
