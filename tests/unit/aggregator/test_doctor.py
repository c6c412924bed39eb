"""The health of an aggregator: what each check finds."""

import dataclasses

import pytest

from aggregator import doctor
from aggregator.config import AggregatorConfig
from aggregator.doctor import diagnose
from aggregator.status.facts import DeviceStatus
from aggregator.status.record import FleetStatus, Problem
from aggregator.storage.backup import restore, save
from aggregator.storage.store import DATABASE
from shoal.version import VERSION
from tests.helpers.run_places import RunPlace

STATUS = FleetStatus(
    fleet="reef",
    running=True,
    connected=True,
    broker="mqtt://reef:1883",
    since_s=1,
    problems=(),
    run=None,
    devices=(),
)


def device(name, reason="", online=True, version=VERSION):
    return DeviceStatus(name=name, online=online, version=version, reason=reason)


@pytest.fixture
def place(tmp_path):
    return RunPlace(tmp_path)


def checks(place):
    return {c.name: c for c in diagnose(AggregatorConfig(place.server))}


def test_a_fresh_aggregator_lacks_only_its_broker_its_start_and_a_backup(place):
    found = checks(place)
    assert {name: c.result for name, c in found.items() if c.result != "ok"} == {
        "broker": "failure",
        "service": "warning",
        "backup": "warning",
    }
    assert found["service"].advice == "start it: shoal-aggregator serve DIR"
    assert found["versions"].detail.startswith(f"shoal {VERSION}, Python 3.")


def test_a_backup_is_asked_for_until_there_is_one_of_the_newest_roster(place, tmp_path):
    check = checks(place)["backup"]
    assert check.detail == "none was made: without this directory the owner has to replace the aggregator"
    assert check.advice == f"shoal-aggregator backup {place.server} FILE, and store it on another machine"
    save(place.server, tmp_path / "file")
    assert checks(place)["backup"].result == "ok"
    place.owner.rotate()
    place.member.adopt(place.owner.roster_bytes)
    assert checks(place)["backup"].detail.endswith("roster 3; the roster is 4 now")
    restore(tmp_path / "file", tmp_path / "again")
    (again,) = (c for c in diagnose(AggregatorConfig(tmp_path / "again")) if c.name == "backup")
    assert again.result == "ok"


def test_a_directory_of_no_fleet_has_the_checks_that_need_none(tmp_path):
    found = diagnose(AggregatorConfig(tmp_path))
    assert [c.name for c in found] == ["membership", "directory", "disk"]
    assert found[0].result == "failure"


def test_damaged_runs_and_files_that_are_none(place):
    plan = place.sign()
    place.finish(plan)
    assert checks(place)["runs"].detail == "1 readable"
    (place.server / "runs/x.run").write_bytes(b"junk")
    assert checks(place)["runs"].result == "warning"
    assert "x.run" in checks(place)["runs"].detail
    (place.directory(plan) / DATABASE).write_bytes(b"no database " * 100)
    assert checks(place)["runs"].result == "failure"


def test_problems_of_the_service_are_told_with_their_advice():
    assert doctor._service(STATUS).result == "ok"
    found = doctor._service(dataclasses.replace(STATUS, connected=False, problems=(Problem("it is away", "start it"),)))
    assert (found.result, found.advice) == ("warning", "start it")
    assert "it is away" in found.detail


def test_devices_with_a_problem_are_grouped_by_reason():
    def of(*devices):
        return doctor._devices(dataclasses.replace(STATUS, devices=devices))

    assert of().result == of(device("dev-1", online=None)).result == of(device("dev-1")).result == "ok"
    found = of(device("dev-1", "offline", online=False), device("dev-2", "odd"), device("dev-3", "odd"))
    assert (found.result, found.detail) == ("warning", "offline: dev-1; odd: dev-2, dev-3")


def test_devices_of_other_versions_are_counted():
    assert (
        doctor._versions(dataclasses.replace(STATUS, devices=(device("dev-1"), device("dev-2", version="")))).result
        == "ok"
    )
    found = doctor._versions(dataclasses.replace(STATUS, devices=(device("dev-1"), device("dev-2", version="9.9"))))
    assert found.result == "warning"
    assert "1 with 9.9" in found.detail
