"""A backup holds every file of the owner's directory and opens with its passphrase alone."""

import pytest

from crypto.seal.passphrase import Lock
from shoal.errors import ConfigError, IntegrityError, UntrustedError
from shoal.membership import backup as backups
from shoal.membership.backup import Backup, write_files
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
    """All files come back private, but for unfinished ones of a killed program; no secret is readable in the backup."""
    (fleet.path / ".secrets.bin.00aa.7.new").write_bytes(b"half")
    made, data = pack(fleet, lock)
    assert (made.fleet, made.roster) == ("reef", 1)
    found = [
        piece for piece in (fleet.secrets.broadcast_key, fleet.owner.reveal(), b"a token", b"tokens/") if piece in data
    ]
    assert found == []
    assert repr(fleet.secrets.broadcast_key)[2:-1] not in repr(made)
    write_files(unpack(data, Lock(PASSPHRASE)), tmp_path / "again")
    assert contents(tmp_path / "again") == contents(fleet.path)
    assert sorted(contents(tmp_path / "again")) == [
        *("owner.key", "receiving.bin", "roster.signed", "secrets.bin", "tokens/0123456789abcdef.token"),
    ]
    modes = {p.stat().st_mode & 0o777 for p in (tmp_path / "again").rglob("*") if p.is_file()}
    assert modes == {0o600}
    assert FleetDirectory(tmp_path / "again").roster == fleet.roster


def test_another_passphrase_is_refused(fleet, lock):
    """And so is each altered byte."""
    data = pack(fleet, lock)[1]
    with refused(UntrustedError, hint_is="give the passphrase under which the backup was made"):
        unpack(data, Lock(b"something else"))
    for at in (40, len(data) // 2, len(data) - 1):
        with pytest.raises(UntrustedError):
            unpack(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], lock)


@pytest.mark.parametrize("data", [b"", b"SHP1", b"a roster", b"SHP1" + bytes(100)])
def test_a_file_that_is_no_backup_is_refused(data, lock):
    with pytest.raises(IntegrityError, match="no backup of a fleet"):
        unpack(data, lock)


@pytest.mark.parametrize(
    ("purpose", "inside", "error", "message", "hint"),
    [
        ("secrets.bin", b"x", UntrustedError, None, ""),
        ("backup", encode(Backup(2, "reef", 1, 0, ())), IntegrityError, "version 2", "version of Shoal"),
        ("backup", b"SHM1 and nothing", IntegrityError, "damaged", ""),
    ],
    ids=["another private file", "another version", "malformed"],
)
def test_other_contents_are_refused(lock, purpose, inside, error, message, hint):
    with refused(error, message, hint=hint):
        unpack(lock.close(purpose, inside), lock)


def test_large_directory_is_refused_unread(fleet, lock, monkeypatch):
    """A directory that is too large is refused before it is read."""
    monkeypatch.setattr(backups, "MAX_BACKUP_BYTES", 100)
    with refused(ConfigError, "more than 100 bytes", hint="runs"):
        pack(fleet, lock)
