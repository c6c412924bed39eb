"""The owner's files: keys and secrets, under a passphrase or not, and a journal for what must change together."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Final

from crypto.mask.secret import MaskSecret
from crypto.seal.envelope import KEY_BYTES
from crypto.seal.passphrase import Lock, is_locked
from shoal.errors import ConfigError, IntegrityError, UntrustedError
from shoal.protocol.codec import U32, decode, encode, message
from shoal.util.files import read_private, sync_directory, write_private

OWNER_FILE: Final = "owner.key"
SECRETS_FILE: Final = "secrets.bin"
ROSTER_FILE: Final = "roster.signed"
CHANGE_FILE: Final = "change.journal"
WRONG_LOCK_HINT: Final = "give it again; where it is right, take the whole directory from a backup"
BACKUP_HINT: Final = "take the whole directory from a backup"


@message(96)
@dataclasses.dataclass(frozen=True, slots=True)
class FleetSecrets:
    """What secrets.bin holds; mode 0600.

    Attributes:
        mask_epoch: the mask epoch that ``mask_secret`` stands at: new devices can't unmask what came before.
        next_epoch: no run has been given this mask epoch or a later one yet.
        next_run: no run has been given this number or a later one yet.
        run_epochs: mask epochs that all runs together have been given.
    """

    fleet: str
    broker: str = dataclasses.field(repr=False)
    mask_secret: bytes = dataclasses.field(repr=False)
    content_key: bytes = dataclasses.field(repr=False)
    broadcast_key: bytes = dataclasses.field(repr=False)
    mask_epoch: U32 = 0
    next_epoch: U32 = 1
    next_run: U32 = 1
    run_epochs: U32 = 0

    @classmethod
    def fresh(cls, fleet: str, broker: str) -> FleetSecrets:
        """Draw all of them."""
        return cls(fleet, broker, MaskSecret.generate().reveal(), os.urandom(KEY_BYTES), os.urandom(KEY_BYTES))


@message(97)
@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """New secrets and the roster that goes with them, as their files will hold them: both, or neither, after a crash."""

    secrets: bytes = dataclasses.field(repr=False)
    roster: bytes


class Vault:
    """Reads and writes the owner's files; ``lock`` holds the passphrase where there is one."""

    def __init__(self, path: Path, lock: Lock | None) -> None:
        self._path, self._lock = path, lock

    def read(self, file: str) -> bytes:
        """Return what a private file holds.

        Raises:
            ConfigError: it is under a passphrase and none is given, or can't be read.
            UntrustedError: the passphrase is wrong.
            IntegrityError: it is damaged.
        """
        return self._unlocked(file, read_private(self._path / file))

    def _unlocked(self, file: str, data: bytes) -> bytes:
        if not is_locked(data):
            return data
        if self._lock is None:
            raise ConfigError(
                f"{self._path / file} is under a passphrase",
                hint="call from a terminal, or name a private file that holds it in SHOAL_PASSPHRASE_FILE",
            )
        try:
            return self._lock.open(file, data)
        except UntrustedError as error:
            raise UntrustedError(f"{self._path / file}: {error}", hint=WRONG_LOCK_HINT) from error
        except IntegrityError as error:
            raise IntegrityError(f"{self._path / file} is damaged: {error}", hint=BACKUP_HINT) from error

    def write(self, file: str, plain: bytes) -> None:
        """Write a private file, under the passphrase where there is one."""
        write_private(self._path / file, self._locked(file, plain))

    def state(self) -> tuple[FleetSecrets, bytes]:
        """Return the secrets and the signed roster that belong together, also while another program changes them.

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
            if not self.is_changing and read_private(self._path / ROSTER_FILE) == roster:
                return secrets, roster

    @property
    def is_changing(self) -> bool:
        """Whether a change is in the journal that is not carried out to its end yet."""
        return (self._path / CHANGE_FILE).exists()

    def change(self, secrets: FleetSecrets, roster: bytes) -> None:
        """Put both in force together; the journal stays until `end_change`."""
        locked = self._locked(SECRETS_FILE, encode(secrets))
        write_private(self._path / CHANGE_FILE, encode(Change(locked, roster)))
        self.carry_out()

    def carry_out(self) -> bool:
        """Write what the journal holds, which a crash may have left half done; return whether there was one."""
        change = self._journal()
        if change is None:
            return False
        write_private(self._path / SECRETS_FILE, change.secrets)
        write_private(self._path / ROSTER_FILE, change.roster)
        return True

    def end_change(self) -> None:
        """Remove the journal: whatever follows from the change is on the disk."""
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
            raise IntegrityError(f"{self._path / SECRETS_FILE} is damaged: {error}", hint=BACKUP_HINT) from error

    def _locked(self, file: str, plain: bytes) -> bytes:
        return plain if self._lock is None else self._lock.close(file, plain)


def is_under_passphrase(path: Path) -> bool:
    """Whether the owner's key in ``path`` needs a passphrase."""
    file = path / OWNER_FILE
    return file.exists() and is_locked(read_private(file))
