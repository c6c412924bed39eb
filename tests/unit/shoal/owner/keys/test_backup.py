"""A backup holds every file of the owner's directory and opens with its passphrase alone."""

import dataclasses

import pytest

from crypto.seal.passphrase import Lock
from shoal.errors import ConfigError, IntegrityError, UntrustedError
from shoal.membership import backup as backups
from shoal.membership.backup import Backup, BackupFile, write_files
from shoal.owner.enrolment.recovery import pack, unpack
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.codec import encode
from shoal.util.files import write_private
from tests.helpers.refusals import refused

PASSPHRASE = b"correct horse battery"


@pytest.fixture(scope="module")
def lock():
    return Lock(PASSPHRASE)


@pytest.fixture
def fleet(tmp_path):
    made = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://127.0.0.1:1")
    write_private(made.path / "tokens" / "0123456789abcdef.token", b"a token")
    return made


def contents(directory):
    found = (p for p in directory.rglob("*") if p.is_file() and not p.name.startswith("."))
    return {p.relative_to(directory).as_posix(): p.read_bytes() for p in found}


def test_files_come_back_and_show_no_secret(fleet, lock, tmp_path):
    """All files come back private and no secret is readable in the backup."""
    made, data = pack(fleet, lock)
    assert (made.fleet, made.roster) == ("reef", 1)
    for piece in (fleet.secrets.broadcast_key, fleet.owner.reveal(), b"a token", b"tokens/"):
        assert piece not in data
    write_files(unpack(data, Lock(PASSPHRASE)), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(fleet.path) != {}
    modes = {p.stat().st_mode & 0o777 for p in (tmp_path / "again").rglob("*") if p.is_file()}
    assert modes == {0o600}
    assert FleetDirectory(tmp_path / "again").roster == fleet.roster


def test_unfinished_files_are_left_out(fleet, lock):
    """Unfinished files of a killed program and locks are left out."""
    (fleet.path / ".secrets.bin.00aa.7.new").write_bytes(b"half")
    names = {file.name for file in pack(fleet, lock)[0].files}
    assert names == {"owner.key", "receiving.bin", "roster.signed", "secrets.bin", "tokens/0123456789abcdef.token"}


def test_another_passphrase_is_refused(fleet, lock):
    with refused(UntrustedError, hint_is="give the passphrase under which the backup was made"):
        unpack(pack(fleet, lock)[1], Lock(b"something else"))


def test_each_altered_byte_is_refused(fleet, lock):
    data = pack(fleet, lock)[1]
    for at in (40, len(data) // 2, len(data) - 1):
        with pytest.raises(UntrustedError):
            unpack(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], lock)


@pytest.mark.parametrize("data", [b"", b"SHP1", b"a roster", b"SHP1" + bytes(100)])
def test_a_file_that_is_no_backup_is_refused(data, lock):
    with pytest.raises(IntegrityError, match="no backup of a fleet"):
        unpack(data, lock)


def test_private_file_is_no_backup(fleet, lock):
    """Another private file of the owner is no backup."""
    with pytest.raises(UntrustedError):
        unpack(lock.close("secrets.bin", b"x"), lock)


def test_other_version_is_refused(lock):
    """A backup of another version is refused with a hint."""
    future = Backup(2, "reef", 1, 0, ())
    with refused(IntegrityError, "version 2", hint="version of Shoal"):
        unpack(lock.close("backup", encode(future)), lock)


def test_malformed_backup_is_damaged(lock):
    """A backup that is malformed inside is damaged."""
    with pytest.raises(IntegrityError, match="damaged"):
        unpack(lock.close("backup", b"SHM1 and nothing"), lock)


def test_large_directory_is_refused_unread(fleet, lock, monkeypatch):
    """A directory that is too large is refused before it is read."""
    monkeypatch.setattr(backups, "MAX_BACKUP_BYTES", 100)
    with refused(ConfigError, "more than 100 bytes", hint="runs"):
        pack(fleet, lock)


def test_the_contents_do_not_show_in_a_repr(fleet, lock):
    made, _ = pack(fleet, lock)
    assert repr(fleet.secrets.broadcast_key)[2:-1] not in repr(made)
    assert dataclasses.fields(BackupFile)[1].repr is False
