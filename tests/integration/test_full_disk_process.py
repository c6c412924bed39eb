"""A device whose disk fills up, as real programs on a real, small disk: it says so, to its owner and to the aggregator."""

from __future__ import annotations

import json
import os

import pytest

from shoal.errors import StorageError
from shoal.transport.local_broker import find_mosquitto
from tests.helpers import waiting
from tests.helpers.calls import call
from tests.helpers.disks import fill, small_disk
from tests.helpers.forked_stages import (
    begin,
    stage_of,
)
from tests.helpers.run_places import LONG_RUN, SLOWLY
from tests.helpers.trees import ROOT

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
NAMES = ("dev-0", "dev-1", "dev-2", "dev-full")
WAIT_S = 60.0


def status(package, directory):
    """Return a program's ``status --json`` as data, and its lines for people."""
    run = lambda *more: call(f"{package}.cli", ["status", str(directory), *more], ROOT, dict(os.environ)).out  # noqa: E731
    return json.loads(run("--json"))["data"], run()


def until(reached, log):
    waiting.until(reached, lambda: log.read_text()[-3000:], WAIT_S)


def test_full_disk_ends_with_status_9(tmp_path):
    """It went on as if nothing were wrong: `stage: working`, nothing at the aggregator, no exit."""
    place = tmp_path / "s" / "devices" / "dev-full"
    with small_disk(place), stage_of(tmp_path, NAMES, environment=SLOWLY) as (stage, _):
        run = begin(stage, LONG_RUN).run
        server = stage.start_aggregator()
        programs = {name: stage.start_device(name, tmp_path / f"{name}.npz") for name in NAMES}
        device = programs["dev-full"]
        until(lambda: any("dev-full" in r["norms"] for r in stage.records(run)), device.log)
        assert "error" not in status("edge_client", place)[0]
        filler = fill(place)
        assert device.process.wait(WAIT_S) == StorageError.exit_code == 9, device.log.read_text()[-3000:]
        assert "No space left on device" in device.log.read_text()
        device.stop()  # closes its log

        data, text = status("edge_client", place)
        assert data["stage"] == "stopped"
        assert data["disk_free_bytes"] == 0
        assert "No space left on device" in data["error"]
        assert data["hint"]
        assert "No space left on device" in text

        until(lambda: "disk is full or fails: dev-full" in server.log.read_text(), server.log)
        assert {"dev-full": "disk"} in [r["declined"] for r in stage.records(run)]

        again = stage.start_device("dev-full", tmp_path / "dev-full.npz")
        assert again.process.wait(WAIT_S) == StorageError.exit_code
        again.stop()
        assert "No space left on device" in status("edge_client", place)[0]["error"]

        filler.unlink()
        rounds = len(stage.records(run))
        healed = stage.start_device("dev-full", tmp_path / "dev-full.npz")
        until(lambda: any("dev-full" in r["norms"] for r in stage.records(run)[rounds:]), healed.log)
        data, _ = status("edge_client", place)
        assert data["stage"] != "stopped"
        assert "error" not in data
