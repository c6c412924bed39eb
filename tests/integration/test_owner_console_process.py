"""The owner's console with real programs and a real broker: start, pause, restart, resume, stop, and a broker that is down."""

import signal
import time

import pytest

from shoal.owner.keys.settings import SETTINGS_FILE
from shoal.transport.local_broker import find_mosquitto
from tests.helpers.waiting import until
from tests.integration.consoles import console_of
from tests.integration.taken_away import NAMES

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]


@pytest.mark.long
def test_run_is_driven_from_owners_machine(tmp_path):
    with console_of(tmp_path) as (console, broker):
        stage, owner = console.stage, console.stage.fleet.path
        assert console.sign() == 1
        settings = owner / SETTINGS_FILE
        settings.write_text("[fleet]\nwait = 0.5\n")
        silent = console.run("start", "--run", 1, status=11).error
        assert "did not answer within 0.5 s" in str(silent)
        assert "run 1 is signed and stored" in silent.hint
        data = console.status()
        settings.unlink()
        assert (data["running"], data["connected"], [d["online"] for d in data["devices"]]) == (None, None, [None] * 3)

        stage.start_aggregator()
        until(lambda: "serving" in stage.programs["aggregator"].tail(50), "the aggregator")
        for name in NAMES:
            stage.start_device(name, tmp_path / f"{name}.npz")
        for _ in range(2):
            assert console.run("start", "--run", 1).out.startswith("run 1: fedavg, ")
        assert [p.name for p in (stage.aggregator_dir / "runs").iterdir()] == ["000001.run"]
        console.goes_on(1)

        assert "paused by the owner" in console.run("pause", 1).out
        until(lambda: console.status()["run"]["phase"] == "gathering", "the pause")
        at = console.closed(1)
        console.restart(signal.SIGKILL)
        until(lambda: "paused by the owner" in stage.programs["aggregator"].tail(), "the pause in the log")
        until(lambda: console.status()["connected"], "the aggregator")
        data = console.status()
        assert (data["run"]["order"], data["run"]["missing"]) == ("paused by the owner", [])
        assert (data["owner"]["pending"], data["owner"]["devices"]) == ([], 3)
        assert console.data("run", "list", owner)["runs"][0]["order"] == "paused by the owner"
        time.sleep(1.0)  # a round takes a third of that
        assert console.closed(1) == at

        console.run("resume", 1)
        console.goes_on(1)
        console.run("stop", 1)
        until(lambda: stage.finished(1), "the end of the run")
        records = stage.records(1)
        assert all(r["contributed"] == 3 for r in records)
        assert [e["kind"] for e in records[-1]["events"]] == ["stopped"]
        assert "finished, stopped by the owner" in console("run", "show", owner, 1).out.splitlines()[1]
        assert len(console("run", "logs", owner, 1, "--last", 4).out.splitlines()) == 4
        assert "is over" in str(console.run("pause", 1, status=11).error)
        console("models", "get", owner, "--out", tmp_path / "m")

        (owner / "requests.count").write_text("1")
        assert "restored from a backup" in console.run("pause", 1, status=3).error.hint
        assert console.run("list").out.startswith("run 1: fedavg, finished")

        broker.stop()
        told = console("status", owner).out
        assert "no answer" in told.splitlines()[0]
        assert not any(name in told for name in NAMES)
        console.run("pause", 1, status=5)
