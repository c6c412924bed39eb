"""The owner's files: keys and secrets, optionally under a passphrase, and a journal for changes of several files.

Secrets and roster must match. A change writes both to the journal first, then replaces the two files, and removes the
journal last. After a crash in between, the next program that opens the directory repeats the replacement.
"""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Final

from crypto.mask.kdf import SECRET_BYTES
from crypto.seal.envelope import KEY_BYTES
from crypto.seal.passphrase import Lock, is_locked
from shoal.errors import ConfigError, IntegrityError, UntrustedError
from shoal.protocol.codec import U32, Fixed32, decode, encode, message
from shoal.util.files import read_private, sync_directory, write_private

OWNER_FILE: Final = "owner.key"
SECRETS_FILE: Final = "secrets.bin"
ROSTER_FILE: Final = "roster.signed"
CHANGE_FILE: Final = "change.journal"
WRONG_LOCK_HINT: Final = "give it again; where it is right, take the whole directory from a backup"
BACKUP_HINT: Final = "take the whole directory from a backup"
RENEWED_HINT: Final = f"{BACKUP_HINT}, or make a new fleet in another directory"


@message(103)
@dataclasses.dataclass(frozen=True, slots=True)
class FleetSecrets:
    """Contents of secrets.bin, mode 0600.

    Attributes:
        broadcast_key: key of the messages to the whole fleet.
        version_secret: secret of the key version, as drawn: that of run 1; see `crypto.mask.schedule.VersionKey`.
        next_run: first run number that is not allocated.
    """

    fleet: str
    broker: str = dataclasses.field(repr=False)
    broadcast_key: Fixed32 = dataclasses.field(repr=False)
    version_secret: Fixed32 = dataclasses.field(repr=False)
    next_run: U32 = 1

    @classmethod
    def fresh(cls, fleet: str, broker: str) -> FleetSecrets:
        """Return freshly drawn secrets."""
        return cls(fleet, broker, broadcast_key=os.urandom(KEY_BYTES), version_secret=os.urandom(SECRET_BYTES))


@message(97)
@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """A journal entry: the new contents of the secrets file and of the roster file, which take effect together."""

    secrets: bytes = dataclasses.field(repr=False)
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
        try:
            return decode(data, Change)
        except IntegrityError as error:
            raise IntegrityError(f"{file} is damaged: {error}", hint=BACKUP_HINT) from error

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
