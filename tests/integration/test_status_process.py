"""`shoal-aggregator status` beside real programs on a real broker: each truth is told within seconds, without blame."""

from __future__ import annotations

import json
import re
import signal
import time

import pytest
from typer.testing import CliRunner

from aggregator.cli import app
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.transport.local_broker import find_mosquitto
from tests.helpers.forked_stages import (
    begin,
    stage_of,
)
from tests.helpers.run_places import SLOWLY

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(180),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
NAMES = ("dev-0", "dev-1", "dev-2")
TOLD_WITHIN_S = 10.0
OPTIONS = Recipe(
    "fedavg",
    rounds=100_000,
    local=LocalTraining(epochs=1, batch_size=16, lr=0.2),
    min_contributors=3,
    quorum=1.0,
    deadline_s=4.0,
    seed=1,
)


def status(directory, *options):
    told = CliRunner().invoke(app, ["status", str(directory), *options])
    assert told.exit_code == 0, told.output
    return told.output


def until(directory, reached, within_s=TOLD_WITHIN_S):
    """Return the first status that is as wanted; fail if that takes too long."""
    end_s = time.monotonic() + within_s
    while True:
        data = json.loads(status(directory, "--json"))["data"]
        if reached(data):
            return data
        assert time.monotonic() < end_s, json.dumps(data, indent=1)
        time.sleep(0.2)


def reasons(data):
    return {d["name"]: d["reason"] for d in data["devices"] if d["reason"]}


def test_dead_parties_are_told_truly(tmp_path):
    """A dead device a stopped broker and a killed aggregator are told truly."""
    with stage_of(tmp_path, NAMES, environment=SLOWLY) as (stage, broker):
        server = stage.aggregator_dir
        assert until(server, lambda d: not d["running"])["since"] is None
        stage.start_aggregator()
        idle = until(server, lambda d: d["connected"], within_s=30)
        assert (idle["broker"], idle["run"]) == (broker.url, None)
        for name in NAMES:
            stage.start_device(name, tmp_path / f"{name}.npz")
        until(server, lambda d: [x["online"] for x in d["devices"]] == [True] * 3, within_s=30)
        begin(stage, OPTIONS)
        data = until(server, lambda d: d["run"] and d["run"]["round"] > 3, within_s=30)
        assert (data["problems"], data["run"]["phase"], reasons(data)) == ([], "round", {})
        assert all(x["version"] and x["last_upload"] for x in data["devices"])

        stage.stop("dev-2", signal.SIGKILL)
        data = until(server, lambda d: reasons(d).get("dev-2") == "offline" and d["problems"])
        assert re.search(r"deadline has passed, 2 (answered|here) and 3 must", data["problems"][0]["reason"])
        assert [m["device"] for m in data["run"]["missing"]] == ["dev-2"]
        assert set(reasons(data)) == {"dev-2"}
        text = status(server)
        assert re.search(r"dev-2: offline since \d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ, last upload \d{4}-", text)
        assert "start dev-2 again" in text

        broker.stop()
        data = until(server, lambda d: not d["connected"])
        assert (data["running"], reasons(data), data["run"]["missing"]) == (True, {}, [])
        (problem,) = data["problems"]
        assert problem["reason"].startswith(f"no connection to the broker at {broker.url}")
        assert f"not connected to {broker.url} since " in status(server).splitlines()[0]
        assert "dev-2:" not in status(server)
        assert "start dev-2" not in status(server)

        stage.stop("aggregator", signal.SIGKILL)
        data = until(server, lambda d: not d["running"], within_s=1)
        assert data["since"] is not None
        assert "killed" in data["problems"][0]["reason"]
        assert status(server).splitlines()[0].split(", ")[-1].startswith("not running since ")

        assert stage.start_aggregator().process.wait(30) == 5
        data = until(server, lambda d: "no MQTT broker can be used" in d["problems"][0]["reason"])
        assert not data["running"]
