"""The health of an aggregator: what each check finds."""

import dataclasses

from aggregator import doctor
from aggregator.config import AggregatorConfig
from aggregator.doctor import diagnose
from aggregator.status.facts import DeviceStatus
from aggregator.status.record import FleetStatus, Problem
from aggregator.storage.backup import restore, save
from aggregator.storage.store import DATABASE
from shoal.version import VERSION

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


def checks(place):
    return {c.name: c for c in diagnose(AggregatorConfig(place.server))}


def test_fresh_one_lacks_broker_and_backup(place):
    """A fresh aggregator lacks only its broker its start and a backup."""
    found = checks(place)
    assert {name: c.result for name, c in found.items() if c.result != "ok"} == {
        "broker": "failure",
        "service": "warning",
        "backup": "warning",
    }
    assert found["service"].advice == "start it: shoal-aggregator serve DIR"
    assert found["versions"].detail.startswith(f"shoal {VERSION}, Python 3.")


def test_backup_of_the_newest_is_asked_for(place, tmp_path):
    """A backup is asked for until there is one of the newest roster."""
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


def test_no_fleet_has_basic_checks(tmp_path):
    """A directory of no fleet has the checks that need none."""
    found = diagnose(AggregatorConfig(tmp_path))
    assert [c.name for c in found] == ["membership", "directory", "disk"]
    assert found[0].result == "failure"


def test_damaged_and_foreign_runs(place):
    """Damaged runs and files that are none."""
    plan = place.sign()
    place.finish(plan)
    assert checks(place)["runs"].detail == "1 readable"
    (place.server / "runs/x.run").write_bytes(b"junk")
    assert checks(place)["runs"].result == "warning"
    assert "x.run" in checks(place)["runs"].detail
    (place.directory(plan) / DATABASE).write_bytes(b"no database " * 100)
    assert checks(place)["runs"].result == "failure"


def test_services_problems_have_advice():
    """Problems of the service are told with their advice."""
    assert doctor._service(STATUS).result == "ok"
    found = doctor._service(dataclasses.replace(STATUS, connected=False, problems=(Problem("it is away", "start it"),)))
    assert (found.result, found.advice) == ("warning", "start it")
    assert "it is away" in found.detail


def test_devices_are_grouped_by_reason():
    """Devices with a problem are grouped by reason."""

    def of(*devices):
        return doctor._devices(dataclasses.replace(STATUS, devices=devices))

    assert of().result == of(device("dev-1", online=None)).result == of(device("dev-1")).result == "ok"
    found = of(device("dev-1", "offline", online=False), device("dev-2", "odd"), device("dev-3", "odd"))
    assert (found.result, found.detail) == ("warning", "offline: dev-1; odd: dev-2, dev-3")


def test_other_versions_are_counted():
    """Devices of other versions are counted."""
    assert (
        doctor._versions(dataclasses.replace(STATUS, devices=(device("dev-1"), device("dev-2", version="")))).result
        == "ok"
    )
    found = doctor._versions(dataclasses.replace(STATUS, devices=(device("dev-1"), device("dev-2", version="9.9"))))
    assert found.result == "warning"
    assert "1 with 9.9" in found.detail
