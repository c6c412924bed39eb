"""A backup of the owner's directory: all of its files in one, encrypted under a passphrase.

- A backup is complete: the owner's key, secrets, roster, receiving keys, grants, tokens, the broker's users and the runs.
- It is as secret as the directory. The passphrase is the fleet's if it has one.
- `unpack` writes into a new directory. What the fleet has seen since the backup is the caller's concern, see
  `shoal.owner.enrolment.recovery`.

Example: ``pack(fleet, lock)`` returns the bytes of the file; ``unpack(data, path, lock)`` writes the same files below ``path``.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Final

from shoal.errors import ConfigError, IntegrityError, UntrustedError, WireError
from shoal.protocol.codec import U32, U64, decode, encode, message
from shoal.util.files import (
    named,
    private_directory,
    read_failed,
    read_if_there,
    sync_directory,
    write_atomic,
    write_private,
)
from shoal.util.locks import LOCK_FILE

if TYPE_CHECKING:
    from crypto.seal.passphrase import Lock
    from shoal.owner.keys.directory import FleetDirectory

PURPOSE: Final = "backup"
LAST_FILE: Final = "backup.last"
BACKUP_VERSION: Final = 1
MAX_BACKUP_BYTES: Final = 1 << 30
"""Largest sum of the files in a backup: half of the most that AES-GCM encrypts in one piece."""
MAX_FILE_BYTES: Final = MAX_BACKUP_BYTES + (1 << 20)
"""Largest backup file, with names and lengths."""


@message(105)
@dataclass(frozen=True, slots=True)
class BackupFile:
    """One file; ``name`` is its path in the directory, with slashes."""

    name: str
    data: bytes = field(repr=False)


@message(106)
@dataclass(frozen=True, slots=True)
class Backup:
    """Contents of a backup.

    Attributes:
        roster: sequence of the newest roster.
        made_at_s: unix seconds.
    """

    version: U32
    fleet: str
    roster: U32
    made_at_s: U64
    files: tuple[BackupFile, ...]


@message(107)
@dataclass(frozen=True, slots=True)
class LastBackup:
    """Contents of backup.last: the roster of the newest backup, and when it was made (unix seconds)."""

    roster: U32
    made_at_s: U64


def record(fleet: FleetDirectory, backup: Backup) -> None:
    """Note in the fleet's directory that this backup was written, for `last_backup`."""
    write_private(fleet.path / LAST_FILE, encode(LastBackup(backup.roster, backup.made_at_s)))


def last_backup(fleet: FleetDirectory) -> LastBackup | None:
    """Return the note of the newest backup; None before the first.

    Raises:
        IntegrityError: the file is damaged.
    """
    path = fleet.path / LAST_FILE
    data = read_if_there(path)
    if data is None:
        return None
    with named(path, "remove it, and make a backup"):
        return decode(data, LastBackup)


def pack(fleet: FleetDirectory, lock: Lock) -> tuple[Backup, bytes]:
    """Return the contents of a backup, and the bytes of its file.

    Raises:
        ConfigError: a file can't be read, or the directory holds more than MAX_BACKUP_BYTES.
    """
    with fleet.changing():
        files = tuple(_files(fleet.path))
        backup = Backup(BACKUP_VERSION, fleet.name, fleet.roster.sequence, int(time.time()), files)
    return backup, lock.close(PURPOSE, encode(backup))


def unpack(data: bytes, lock: Lock) -> Backup:
    """Return the contents of a backup file.

    Raises:
        UntrustedError: the passphrase is wrong, or the file was altered.
        IntegrityError: it is no backup, or of another version.
    """
    try:
        plain = lock.open(PURPOSE, data)
    except IntegrityError as error:
        raise IntegrityError("this is no backup of a fleet", hint="shoal-fleet backup DIR FILE writes one") from error
    except UntrustedError as error:
        raise UntrustedError(str(error), hint="give the passphrase under which the backup was made") from error
    try:
        backup = decode(plain, Backup)
    except WireError as error:
        raise IntegrityError(f"the backup is damaged: {error}", hint="take another backup") from error
    if backup.version != BACKUP_VERSION:
        raise IntegrityError(
            f"the backup is of version {backup.version}, this program reads {BACKUP_VERSION}",
            hint="restore it with the version of Shoal that made it",
        )
    return backup


def write_files(backup: Backup, directory: Path) -> None:
    """Write a backup's files below ``directory``, a new one; durable on return.

    Raises:
        IntegrityError: a name leads out of the directory.
        ConfigError: a file can't be written.
    """
    private_directory(directory)
    folders = {directory}
    for file in backup.files:
        path = directory / _checked(file.name)
        private_directory(path.parent)
        folders.add(path.parent)
        write_atomic(path, file.data, sync_name=False)
    for folder in folders:
        sync_directory(folder)


def _checked(name: str) -> PurePosixPath:
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts:
        raise IntegrityError(f"the backup has a file named {name!r}, outside of the fleet's directory")
    return path


def _files(directory: Path) -> Iterator[BackupFile]:
    total = 0
    for path in sorted(directory.rglob("*")):
        # Locks and the unfinished files of a killed program begin with a dot, and no file of the fleet does.
        if path.name == LOCK_FILE or path.name.startswith(".") or path.is_dir():
            continue
        data = _read(path, MAX_BACKUP_BYTES - total)
        total += len(data)
        yield BackupFile(path.relative_to(directory).as_posix(), data)


def _read(path: Path, most: int) -> bytes:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                raise ConfigError(
                    f"the fleet's directory holds more than {MAX_BACKUP_BYTES} bytes",
                    hint="move the files of old runs out of its folder runs",
                )
            return file.read(most)
    except OSError as error:
        raise read_failed(path, error) from error
