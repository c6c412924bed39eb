"""Devices are told of the owner's orders and of its choice of models, also after a restart and under newer keys."""

import json

import pytest
from typer.testing import CliRunner

from edge_client.cli import app
from edge_client.storage.finished_models import FinishedModels
from shoal.owner.console.asking import sign_choice
from shoal.protocol.requests import Outcome, RequestAction
from shoal.util.files import exclusive
from tests.helpers.fleets import (
    begin_run,
    grouped_data,
    make_fleet,
    restart_aggregator,
    restart_device,
)
from tests.helpers.owner_models import reader_of
from tests.scenarios.rounds.test_finished_models import finish

PAUSE, RESUME, STOP, CHOOSE = RequestAction.PAUSE, RequestAction.RESUME, RequestAction.STOP, RequestAction.CHOOSE
NAME = "dev-01"


def order(fleet, action, **parts):
    question = fleet.ask(action, **parts)
    assert question.answer.outcome is Outcome.DONE, question.answer
    fleet.settle()


def status(fleet, *options, name=NAME):
    """Return what ``shoal-edge status`` prints for a device whose program runs."""
    end_s = fleet.now_s + 2
    fleet.run_until(lambda: fleet.now_s >= end_s, 10)
    directory = fleet.stage.device_dir(name)
    with exclusive(directory, wait_s=0, hint=""):
        told = CliRunner().invoke(app, ["status", str(directory), *options])
    assert told.exit_code == 0, told.output
    return told.output


def orders(fleet):
    """Return the order that each running device knows."""
    return {name: device.runtime.session.order for name, device in fleet.devices.items()}


def restart(fleet, *names):
    """Restart devices, or the aggregator without a name."""
    for name in names:
        restart_device(fleet, name)
    if not names:
        restart_aggregator(fleet)
    fleet.settle()


PAUSED = "run 1 is paused by the owner"


def test_device_knows_that_its_run_is_paused(tmp_path):
    with make_fleet(tmp_path / "fleet", rounds=9, deadline_s=500.0) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, 20)
        assert set(orders(fleet).values()) == {""}
        order(fleet, PAUSE, run=1)
        assert set(orders(fleet).values()) == {PAUSED}
        assert f"{PAUSED}\n" in status(fleet)
        assert json.loads(status(fleet, "--json"))["data"]["order"] == PAUSED
        for names in ([NAME], [], [NAME]):
            restart(fleet, *names)
            assert set(orders(fleet).values()) == {PAUSED}
            assert PAUSED in status(fleet)
        fleet.stage.fleet.rotate()
        fleet.publish()
        restart(fleet, NAME)
        assert orders(fleet)[NAME] == PAUSED, "under newer keys"
        fleet.broker.retained.clear()
        fleet.broker.disconnect(fleet.client_id("aggregator"))
        fleet.broker.reconnect(fleet.client_id("aggregator"))
        restart(fleet, NAME)
        assert orders(fleet)[NAME] == PAUSED, "after the broker was away"
        order(fleet, RESUME, run=1)
        assert set(orders(fleet).values()) == {""}
        assert "paused" not in status(fleet)
        fleet.run(500)


def test_device_knows_its_run_is_stopped(tmp_path):
    """A device knows that its run is stopped until it is over."""
    with make_fleet(tmp_path / "fleet", rounds=50) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, 20)
        fleet.kill_device("dev-02")
        order(fleet, STOP, run=1)
        assert orders(fleet)[NAME] == "run 1 is stopped by the owner"
        fleet.revive_device("dev-02")
        fleet.run(500)
        fleet.settle()
        assert set(orders(fleet).values()) == {""}


@pytest.fixture
def finished(tmp_path):
    """A fleet that has finished runs 1 and 2."""
    with make_fleet(tmp_path / "fleet", rounds=3) as fleet:
        finish(fleet)
        begin_run(fleet)
        finish(fleet)
        yield fleet


def choose(fleet, run):
    order(fleet, CHOOSE, package=sign_choice(fleet.stage.fleet, run, print))


def standing(fleet, name):
    return FinishedModels(fleet.stage.device_dir(name)).standing()


def answering(fleet):
    """Return device -> the run whose finished model answers, by the devices' own files."""
    return {name: standing(fleet, name).answers.run for name in ("dev-00", "dev-01", "dev-02")}


def everywhere(run):
    return {"dev-00": run, "dev-01": run, "dev-02": run}


def test_the_owner_rolls_all_devices_back(finished):
    """One is off meanwhile. The owner sees the effect in the presences."""
    fleet = finished
    before = answering(fleet)
    fleet.kill_device(NAME)
    choose(fleet, 1)
    assert answering(fleet) == everywhere(1) | {NAME: before[NAME]}
    fleet.revive_device(NAME)
    fleet.settle()
    assert answering(fleet) == everywhere(1)
    assert reader_of(fleet).answers == everywhere(1)
    assert fleet.service.watch.devices.devices[NAME].model_run == 1
    told = CliRunner().invoke(app, ["models", str(fleet.stage.device_dir(NAME))])
    assert "run 1; finished" in told.output
    assert "answers, chosen by the owner" in told.output
    for names in ([NAME], []):
        restart(fleet, *names)
        assert answering(fleet) == everywhere(1)
    choose(fleet, 0)
    assert answering(fleet) == before


def test_rollback_ends_with_the_next_run(finished):
    """A rollback ends with the next finished run."""
    fleet = finished
    choose(fleet, 1)
    begin_run(fleet, rounds=3)
    finish(fleet)
    assert not any(standing(fleet, name).by_owner for name in fleet.stage.devices)
    after = answering(fleet)
    assert reader_of(fleet).answers == after
    restart(fleet, NAME)
    assert answering(fleet) == after, "the retained choice has no effect any more"


def test_later_device_keeps_its_own(finished):
    """A device that was admitted later keeps its own."""
    fleet = finished
    fleet.add_device("dev-03", grouped_data(4)["dev-03"])
    fleet.settle()
    choose(fleet, 1)
    assert standing(fleet, "dev-03").answers is None
    assert answering(fleet) == everywhere(1)
    assert reader_of(fleet).answers["dev-03"] == 0
