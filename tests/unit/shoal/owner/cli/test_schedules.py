"""`shoal-fleet schedule`: its lines and its JSON, against a fleet on the loopback broker."""

import json

import pytest
from shoal_lab.loopback.fleet import EPOCH_S
from typer.testing import CliRunner

from shoal.errors import NotReadyError, ShoalError, UsageError
from shoal.owner.cli import schedules
from shoal.owner.cli.main import app
from shoal.owner.runs.standing import order_in_force
from shoal.protocol.documents import Schedule
from tests.helpers.fleets import make_fleet
from tests.helpers.refusals import refused

DAY_S = 24 * 3600


@pytest.fixture
def fleet(tmp_path, answering):
    order = Schedule(order=bytes(16), count=3, interval_s=DAY_S, until_s=EPOCH_S + 30 * DAY_S)
    with make_fleet(tmp_path / "fleet", rounds=1, schedule=order) as made:
        yield answering(made)


def call(*words):
    done = CliRunner().invoke(app, ["schedule", *map(str, words)])
    if done.exception is not None and isinstance(done.exception, ShoalError):
        raise done.exception
    assert done.exit_code == 0, (done.output, done.exception)
    return done.stdout


def test_list_pause_resume_and_stop(fleet):
    owner = fleet.stage.fleet.path
    assert json.loads(call("list", owner, "--json"))["data"]["interval_s"] == DAY_S
    assert call("pause", owner).endswith("paused by the owner\n")
    fleet.run(100)
    assert "runs 1 to 3, 1 begun, one every 1 d" in call("resume", owner)
    assert order_in_force(fleet.stage.fleet) is not None
    assert "stopped by the owner" in call("stop", owner)
    assert order_in_force(fleet.stage.fleet) is None


def test_another_run_asks(fleet, tmp_path):
    """Without a terminal it is refused, and so is a schedule without its parts."""
    owner = fleet.stage.fleet.path
    with refused(UsageError, "nothing is signed", hint="schedule stop"):
        call(owner, "--task", tmp_path, "--rounds", 1)
    call("stop", owner)
    with pytest.raises(UsageError, match="--at-most and --until belong to"):
        call(owner, "--task", tmp_path, "--at-most", 3)


def test_keys_are_drawn(fleet, capsys, monkeypatch):
    """The order is signed again and sent; without the aggregator a line says so."""
    owner = fleet.stage.fleet
    owner.rotate()
    fleet.publish()
    schedules.send_again(owner)
    assert "the aggregator has the standing order, signed under the newest keys" in capsys.readouterr().err
    assert fleet.standing.plan.key_version == owner.roster.keys_since

    def gone(*_parts, **_more):
        raise NotReadyError("the aggregator did not answer")

    monkeypatch.setattr("shoal.owner.console.asking.ask", gone)
    schedules.send_again(owner)
    assert "has not got it: the aggregator did not answer" in capsys.readouterr().err
