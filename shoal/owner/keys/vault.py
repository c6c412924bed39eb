"""The owner's files: keys and secrets, optionally under a passphrase, and a journal for changes of several files.

Secrets and roster must match. A change writes both to the journal first, then replaces the two files, and removes the
journal last. After a crash in between, the next program that opens the directory repeats the replacement.

`StoredVersions` holds the secrets of earlier key versions, which open the final models of a run that ended before the owner
drew newer ones. A run that is under way takes up a newer version at its next round. Its last round may still be under an older
one, and the owner does not see from here when a run ends. So each draw after the first signed run stores the secrets that it
replaces. Key versions never go back, so `shoal-fleet models get` removes all that are older than the one that it needed. An
owner who never fetches models stores at most MOST_VERSIONS.

For instance, run 1 is signed under version 4, and the owner admits a device, which draws version 7. Versions 4 and 7 are known.
The models of run 1 turn out to be under version 7, so version 4 is removed.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from crypto.mask.kdf import SECRET_BYTES
from crypto.seal.envelope import KEY_BYTES
from crypto.seal.passphrase import Lock, is_locked
from shoal.errors import ConfigError, IntegrityError, UntrustedError
from shoal.protocol.codec import U32, Fixed32, decode, encode, message
from shoal.util.files import named, read_private, sync_directory, write_private

OWNER_FILE: Final = "owner.key"
SECRETS_FILE: Final = "secrets.bin"
ROSTER_FILE: Final = "roster.signed"
CHANGE_FILE: Final = "change.journal"
WRONG_LOCK_HINT: Final = "give it again; where it is right, take the whole directory from a backup"
BACKUP_HINT: Final = "take the whole directory from a backup"
RENEWED_HINT: Final = f"{BACKUP_HINT}, or make a new fleet in another directory"


@message(103)
@dataclass(frozen=True, slots=True)
class FleetSecrets:
    """Contents of secrets.bin, mode 0600.

    Attributes:
        broadcast_key: key of the messages to the whole fleet.
        version_secret: secret of the key version, as drawn: that of run 1; see `crypto.mask.schedule.VersionKey`.
        next_run: first run number that is not allocated.
    """

    fleet: str
    broker: str = field(repr=False)
    broadcast_key: Fixed32 = field(repr=False)
    version_secret: Fixed32 = field(repr=False)
    next_run: U32 = 1

    @classmethod
    def fresh(cls, fleet: str, broker: str) -> FleetSecrets:
        """Return freshly drawn secrets."""
        return cls(fleet, broker, broadcast_key=os.urandom(KEY_BYTES), version_secret=os.urandom(SECRET_BYTES))


@message(97)
@dataclass(frozen=True, slots=True)
class Change:
    """A journal entry: the new contents of the secrets file and of the roster file, which take effect together."""

    secrets: bytes = field(repr=False)
    roster: bytes


class Vault:
    """Reads and writes the owner's files; ``lock`` holds the passphrase, or is None without one."""

    def __init__(self, path: Path, lock: Lock | None) -> None:
        self._path, self._lock = path, lock

    def read(self, file: str) -> bytes:
        """Return the plaintext of a private file.

        Raises:
            ConfigError: the file can't be read, or is under a passphrase and none is given.
            UntrustedError: the passphrase is wrong.
            IntegrityError: the file is damaged.
        """
        return self._unlocked(file, read_private(self._path / file))

    def _unlocked(self, file: str, data: bytes) -> bytes:
        if not is_locked(data):
            return data
        if self._lock is None:
            raise ConfigError(
                f"{self._path / file} is under a passphrase",
                hint="call from a terminal, or set SHOAL_PASSPHRASE_FILE to a private file that holds the passphrase",
            )
        try:
            return self._lock.open(file, data)
        except UntrustedError as error:
            raise UntrustedError(f"{self._path / file}: {error}", hint=WRONG_LOCK_HINT) from error
        except IntegrityError as error:
            raise IntegrityError(f"{self._path / file} is damaged: {error}", hint=BACKUP_HINT) from error

    def write(self, file: str, plain: bytes) -> None:
        """Write a private file, encrypted if there is a passphrase."""
        write_private(self._path / file, self._locked(file, plain))

    def state(self) -> tuple[FleetSecrets, bytes]:
        """Return matching secrets and signed roster, even while another program changes them.

        Raises:
            ConfigError: as `read`.
            IntegrityError: a file is damaged.
        """
        while True:
            change = self._journal()
            if change is not None:
                return self._secrets(self._unlocked(SECRETS_FILE, change.secrets)), change.roster
            roster = read_private(self._path / ROSTER_FILE)
            secrets = self._secrets(self.read(SECRETS_FILE))
            # A change that began and ended between the two reads would have mixed an old file with a new one.
            if not self.is_changing and read_private(self._path / ROSTER_FILE) == roster:
                return secrets, roster

    @property
    def is_changing(self) -> bool:
        """Whether the journal holds an unfinished change."""
        return (self._path / CHANGE_FILE).exists()

    def change(self, secrets: FleetSecrets, roster: bytes) -> None:
        """Journal and apply new secrets and the roster that goes with them; the journal remains until `end_change`."""
        locked = self._locked(SECRETS_FILE, encode(secrets))
        write_private(self._path / CHANGE_FILE, encode(Change(locked, roster)))
        self.carry_out()

    def carry_out(self) -> bool:
        """Apply the journal, which a crash may have left half done; return whether there was one."""
        change = self._journal()
        if change is None:
            return False
        write_private(self._path / SECRETS_FILE, change.secrets)
        write_private(self._path / ROSTER_FILE, change.roster)
        return True

    def end_change(self) -> None:
        """Remove the journal; call it once everything that follows from the change is on disk."""
        (self._path / CHANGE_FILE).unlink(missing_ok=True)
        sync_directory(self._path)

    def _journal(self) -> Change | None:
        file = self._path / CHANGE_FILE
        try:
            data = read_private(file)
        except ConfigError:
            if file.exists():
                raise
            return None
        with named(file, BACKUP_HINT):
            return decode(data, Change)

    def _secrets(self, plain: bytes) -> FleetSecrets:
        try:
            return decode(plain, FleetSecrets)
        except IntegrityError as error:
            raise IntegrityError(
                f"{self._path / SECRETS_FILE} is damaged, or an earlier version of Shoal made this fleet: {error}",
                hint=RENEWED_HINT,
            ) from error

    def _locked(self, file: str, plain: bytes) -> bytes:
        return plain if self._lock is None else self._lock.close(file, plain)


def is_under_passphrase(path: Path) -> bool:
    """Return whether the owner's key in directory ``path`` is under a passphrase."""
    file = path / OWNER_FILE
    return file.exists() and is_locked(read_private(file))


VERSIONS_FILE: Final = "versions.bin"
MOST_VERSIONS: Final = 64
"""Most earlier versions that are stored; the oldest is removed first."""


@message(101)
@dataclass(frozen=True, slots=True)
class VersionSecrets:
    """The secrets of one key version that open what the fleet sealed under it.

    Attributes:
        number: the key version.
        version_secret: as drawn, see `crypto.mask.schedule.VersionKey`.
        broadcast_key: key of the messages to the whole fleet.
    """

    number: U32
    version_secret: Fixed32 = field(repr=False)
    broadcast_key: Fixed32 = field(repr=False)


@message(102)
@dataclass(frozen=True, slots=True)
class StoredVersions:
    """Contents of versions.bin, mode 0600, in ascending order of their numbers."""

    versions: tuple[VersionSecrets, ...] = ()

    def adding(self, secrets: VersionSecrets) -> StoredVersions:
        """Return these versions and one more, which replaces any of the same number."""
        found = {v.number: v for v in (*self.versions, secrets)}
        return StoredVersions(tuple(found[number] for number in sorted(found)[-MOST_VERSIONS:]))

    def since(self, number: int) -> StoredVersions:
        """Return these versions without those before ``number``."""
        return StoredVersions(tuple(v for v in self.versions if v.number >= number))


RUNS: Final = "runs"

_NUMBERED: Final = re.compile(r"([0-9]{6})\.run")


def run_file(path: Path, run: int) -> Path:
    """Return the path of a run's file in the owner's directory ``path``."""
    return path / RUNS / f"{run:06d}.run"


def highest_run(path: Path) -> int:
    """Return the highest run number of a file in the owner's directory ``path``, 0 if it holds no run."""
    found = (_NUMBERED.fullmatch(p.name) for p in (path / RUNS).glob("*.run"))
    return max((int(m[1]) for m in found if m), default=0)
