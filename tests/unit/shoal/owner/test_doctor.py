"""The owner's health checks: a result for each state of the directory and of the broker."""

import dataclasses
import time

import pytest

from shoal.errors import BrokerUnreachableError
from shoal.membership import backup as backups
from shoal.owner import doctor
from shoal.owner.doctor import diagnose
from shoal.owner.keys.directory import FleetDirectory
from shoal.util.console import ok
from tests.helpers.enrolments import ROSTER_TOPIC, Connected, Scene


@pytest.fixture
def scene(tmp_path, monkeypatch):
    """A fleet with one device, whose roster is at the broker."""
    made = Scene(tmp_path)
    made.enrol("dev-1")
    monkeypatch.setattr(doctor, "OwnerConnection", lambda fleet, *_, **__: Connected(made, fleet))
    monkeypatch.setattr(doctor, "broker_checks", lambda *_: [ok("broker", "up"), ok("tls", "none")])
    return made


def found(scene, path=None):
    checks = {c.name: c for c in diagnose(path or scene.owner.path)}
    assert len(checks) > 1
    return checks


def impaired(checks):
    return {name: c.result for name, c in checks.items() if c.result != "ok"}


def back_up(scene, **changes):
    made = backups.Backup(1, "reef", scene.owner.roster.sequence, int(time.time()), ())
    backups.record(scene.owner.path, dataclasses.replace(made, **changes))


def test_healthy_fleet_has_nothing_to_report(scene):
    back_up(scene)
    checks = found(scene)
    assert impaired(checks) == {}
    assert list(checks) == [
        *("fleet", "directory", "disk", "roster", "devices", "runs", "backup", "versions"),
        *("broker", "tls", "published", "requests"),
    ]
    assert checks["published"].detail == "the broker holds roster 3, the newest"


def test_missing_or_old_backup(scene):
    """A fleet without a backup, with an old one, or with a damaged note of it."""
    assert found(scene)["backup"].detail.startswith("none was made")
    back_up(scene, roster=2)
    assert found(scene)["backup"].detail.endswith("roster 2; the roster is 3 now")
    back_up(scene, made_at_s=int(time.time()) - 31 * 86400)
    check = found(scene)["backup"]
    assert (check.result, ", 31 d" in check.detail) == ("warning", True)
    assert "shoal-fleet backup" in check.advice
    (scene.owner.path / backups.LAST_FILE).write_bytes(b"x")
    assert found(scene)["backup"].result == "failure"


def test_a_roster_that_was_not_published(scene):
    scene.owner.revoke("dev-1")
    check = found(scene)["published"]
    assert (check.result, check.detail) == ("warning", "the broker holds roster 3, the newest is 4")
    assert check.advice == f"shoal-fleet publish {scene.owner.path}"
    scene.leave(ROSTER_TOPIC, b"")
    assert found(scene)["published"].detail == "the broker holds no roster of this fleet"


def test_directory_behind_fleet_is_a_failure(scene, tmp_path):
    backups.write_files(
        backups.Backup(1, "reef", 3, 0, tuple(backups.files_of(scene.owner.path, "**/*"))), tmp_path / "copy"
    )
    scene.enrol("dev-2")
    check = found(scene, tmp_path / "copy")["published"]
    assert (check.result, "which is not here (roster 3)" in check.detail) == ("failure", True)
    assert "restore" in check.advice


def test_devices_out_of_keys_are_named(scene):
    """And those that wait for approval."""
    scene.ask(scene.token(), "dev-9")
    for _ in range(40):
        scene.owner.rotate()
    checks = found(scene)
    named = {name: (checks[name].result, checks[name].detail) for name in ("devices", "requests")}
    assert named == {
        "devices": ("warning", "no unused receiving keys are known of dev-1"),
        "requests": ("warning", "dev-9 wait for approval"),
    }


def test_without_broker_the_rest_is_checked(scene, monkeypatch):
    down = doctor.Check("broker", "failure", "refused", "start it")
    monkeypatch.setattr(doctor, "broker_checks", lambda *_: [down, ok("tls", "none")])
    checks = found(scene)
    assert "published" not in checks
    assert checks["broker"] == down


def test_vanished_broker_is_a_failure(scene, monkeypatch):
    """A broker that goes away meanwhile is a failure."""

    def away(*_args, **_kwargs):
        raise BrokerUnreachableError("gone", hint="start it")

    monkeypatch.setattr(doctor, "OwnerConnection", away)
    assert found(scene)["published"].result == "failure"


def test_a_directory_of_no_fleet(tmp_path):
    """And of one without an aggregator, which is incomplete."""
    (tmp_path / "d").mkdir(mode=0o700)
    first, *rest = diagnose(tmp_path / "d")
    assert (first.name, first.result) == ("fleet", "failure")
    assert [c.name for c in rest] == ["directory", "disk"]
    assert [c.name for c in diagnose(tmp_path / "gone")] == ["fleet"]
    FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://127.0.0.1:1")
    check = {c.name: c for c in diagnose(tmp_path / "owner")}["fleet"]
    assert (check.result, check.detail) == ("warning", "fleet reef, 0 devices, no aggregator")
