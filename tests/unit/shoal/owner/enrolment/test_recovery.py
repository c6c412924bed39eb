"""A restored owner never goes back behind the fleet: revoked devices stay revoked, no secret and no run number is used again."""

import dataclasses
from pathlib import Path

import pytest

from crypto.seal.passphrase import Lock
from edge_client.membership import DeviceMembership
from edge_client.protocol.presence import receiving_notice
from shoal.errors import BrokerUnreachableError, ConfigError, IntegrityError, UntrustedError
from shoal.membership.backup import BackupFile
from shoal.owner.enrolment import recovery
from shoal.owner.enrolment.recovery import pack, restore
from shoal.owner.keys.directory import RUNS_AFTER_RESTORE, FleetDirectory
from tests.helpers.enrolments import NOW_S, ROSTER_TOPIC, Connected, Scene
from tests.helpers.refusals import refused

LOCK = Lock(b"correct horse battery")


@pytest.fixture
def scene(tmp_path, monkeypatch):
    made = Scene(tmp_path)
    made.enrol("dev-1")
    made.enrol("dev-2")
    monkeypatch.setattr(recovery, "OwnerConnection", lambda fleet, *_, **__: Connected(made, fleet))
    return made


@pytest.fixture
def bring_back(scene):
    """Restore into scene.root/restored, with options of `restore`."""

    def bring(backup, **options):
        return restore(backup, scene.root / "restored", LOCK, scene.complaints.append, **options)

    return bring


def backup_of(scene):
    return pack(scene.owner, LOCK)[0]


@pytest.fixture
def backup(scene):
    return backup_of(scene)


def test_restored_owner_goes_beyond(scene, bring_back):
    """Nothing happened since the backup: the devices are the same, and neither secrets nor run numbers are used again."""
    run = scene.owner.take_run()
    backup = backup_of(scene)
    used = scene.owner.take_run()
    fleet = bring_back(backup)
    assert fleet.roster.devices == scene.owner.roster.devices
    assert fleet.roster.sequence == scene.owner.roster.sequence + 1
    assert fleet.secrets.version_secret != scene.owner.secrets.version_secret
    assert fleet.secrets.broadcast_key != scene.owner.secrets.broadcast_key
    assert fleet.take_run() == used + RUNS_AFTER_RESTORE > run
    scene.publish(fleet)
    scene.take_roster()
    assert scene.server.roster == fleet.roster
    assert scene.complaints == []


def test_backup_behind_the_fleet_is_refused(scene, backup, bring_back):
    """It leaves nothing. With --older the owner accepts the loss, and is warned."""
    scene.owner.revoke("dev-2")
    scene.publish()
    behind = "the fleet has roster 5, and the newest here is 4"
    with refused(UntrustedError, behind, hint="--roster SERVER_DIR/roster.signed"):
        bring_back(backup)
    assert [path.name for path in scene.root.glob("*restored*")] == []
    fleet = bring_back(backup, older=True)
    assert list(fleet.roster.active()) == ["dev-1", "dev-2"]
    assert fleet.roster.sequence == scene.owner.roster.sequence + 1
    assert "revoke again those that were revoked since" in scene.complaints[-1]


def test_newest_roster_keeps_revocations(scene, bring_back):
    """With it a revoked device stays revoked and a new one stays; models of before are stored under their own key version."""
    scene.owner.take_run()
    backup, before = backup_of(scene), scene.owner.versions[0]
    scene.owner.revoke("dev-2")
    scene.publish()
    newcomer = scene.enrol("dev-3")
    scene.leave(*receiving_notice(newcomer))
    fleet = bring_back(backup, roster=scene.owner.roster_bytes)
    assert fleet.roster.revoked == ("dev-2",)
    assert list(fleet.roster.active()) == ["dev-1", "dev-3"]
    assert fleet.roster.sequence == scene.owner.roster.sequence + 1
    assert fleet.receiving.of("dev-3").receiving == newcomer.receiving.public
    assert before in fleet.versions[1:]
    scene.publish(fleet)


def test_replaced_device_gets_no_old_key(scene, backup, bring_back):
    """The backup has the receiving keys of the device that was replaced since: secrets are sealed to the new one's."""
    (scene.root / "dev-1").rename(scene.root / "lost")
    scene.ask(scene.token(), "dev-1")
    registrar = scene.sit()
    registrar.approve_all([registrar.give_way("dev-1", "", NOW_S)], NOW_S)
    scene.leave(*receiving_notice(DeviceMembership(scene.root / "dev-1")))
    fleet = bring_back(backup, roster=scene.owner.roster_bytes)
    assert fleet.receiving.of("dev-1").receiving == DeviceMembership(scene.root / "dev-1").receiving.public


def test_without_broker_nothing_is_restored(scene, backup, bring_back, monkeypatch):
    """Unless the owner says --offline, which leaves room for the rosters signed since."""

    def away(*_args, **_kwargs):
        raise BrokerUnreachableError("no broker answers")

    monkeypatch.setattr(recovery, "OwnerConnection", away)
    with refused(BrokerUnreachableError, hint="--offline"):
        bring_back(backup)
    assert not (scene.root / "restored").exists()
    assert bring_back(backup, offline=True).roster.sequence == scene.owner.roster.sequence + 1001


def test_broker_without_roster_is_reported(scene, backup, bring_back):
    """What a killed restore left is replaced."""
    scene.leave(ROSTER_TOPIC, b"")
    left = scene.root / ".restored.restoring"
    left.mkdir()
    (left / "owner.key").write_bytes(b"half")
    assert bring_back(backup).name == "reef"
    assert not left.exists()
    assert "holds no roster of this fleet" in "\n".join(scene.complaints)


def test_device_without_keys_is_named(scene, backup, bring_back):
    """A device without receiving keys is named."""
    scene.enrol("dev-3")
    with refused(ConfigError, "no receiving keys of dev-3", hint="start them"):
        bring_back(backup, roster=scene.owner.roster_bytes)


def test_older_or_foreign_roster_is_refused(scene, bring_back, tmp_path):
    """An older roster and another fleets are refused."""
    older = scene.owner.roster_bytes
    scene.owner.renew()
    with pytest.raises(UntrustedError, match="rollback"):
        bring_back(backup_of(scene), roster=older)
    other = FleetDirectory.create(tmp_path / "other", "reef", "mqtt://loopback")
    with pytest.raises(UntrustedError):
        bring_back(backup_of(scene), roster=other.roster_bytes)
    with pytest.raises(IntegrityError):
        bring_back(backup_of(scene), roster=b"no roster")


@pytest.mark.parametrize(
    "occupy",
    [lambda target: target.write_bytes(b"mine"), Path.mkdir, lambda target: target.symlink_to(target.parent / "owner")],
    ids=["file", "directory", "link"],
)
def test_occupied_target_is_left_alone(scene, backup, bring_back, occupy):
    """A target that holds something is left alone."""
    occupy(scene.root / "restored")
    if (scene.root / "restored").is_dir():
        (scene.root / "restored" / "mine").write_bytes(b"mine")
    with pytest.raises(ConfigError, match="exists already"):
        bring_back(backup)
    assert scene.owner.path.exists()


def test_damaged_file_inside_leaves_nothing(scene, backup, bring_back):
    files = tuple(BackupFile(f.name, b"x" if f.name == "secrets.bin" else f.data) for f in backup.files)
    with pytest.raises(IntegrityError):
        bring_back(dataclasses.replace(backup, files=files))
    assert not (scene.root / "restored").exists()
