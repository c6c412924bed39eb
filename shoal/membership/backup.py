"""Backups of a party's directory: its files as one message, the note of the newest backup, and the check of it for `doctor`.

The owner encrypts the message (`shoal.owner.keys.vault`); the aggregator writes it with a checksum.

Example: ``files_of(directory, "*.key")`` yields the keys of a backup; ``write_files(backup, target)`` writes them again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Final

from shoal.errors import ConfigError, IntegrityError, WireError
from shoal.protocol.codec import U32, U64, decode, encode, message
from shoal.util.console import Check, ok, say, say_json, second, span
from shoal.util.files import (
    LOCK_FILE,
    named,
    private_directory,
    read_failed,
    read_if_there,
    sync_directory,
    write_atomic,
    write_private,
)

LAST_FILE: Final = "backup.last"
BACKUP_VERSION: Final = 1
MAX_BACKUP_BYTES: Final = 1 << 30
"""Largest sum of the files in a backup: half of the most that AES-GCM encrypts in one piece."""
MAX_FILE_BYTES: Final = MAX_BACKUP_BYTES + (1 << 20)
"""Largest backup file, with names and lengths."""
OLD_BACKUP_S: Final = 30 * 86400
"""Age from which a backup is reported, although no roster was signed since."""
LOSSES: Final = {
    "shoal-fleet": "without this directory the fleet is lost",
    "shoal-aggregator": "without this directory the owner has to replace the aggregator",
}
"""What is lost without a backup, by program."""


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


def record(directory: Path, backup: Backup) -> None:
    """Note in the party's directory that this backup was written, for `backup_check`."""
    write_private(directory / LAST_FILE, encode(LastBackup(backup.roster, backup.made_at_s)))


def backup_check(program: str, directory: Path, roster: int, now_s: int) -> Check:
    """Return the check that there is a backup of this roster that is not old.

    Args:
        program: the party's, which makes backups.
        directory: the party's.
        roster: sequence of its roster.
        now_s: unix seconds.

    Raises:
        IntegrityError: the note of the newest backup is damaged.
    """
    path, hint = directory / LAST_FILE, f"{program} backup {directory} FILE, and store it on another machine"
    data = read_if_there(path)
    if data is None:
        return Check("backup", "warning", f"none was made: {LOSSES[program]}", hint)
    with named(path, "remove it, and make a backup"):
        last = decode(data, LastBackup)
    detail = f"of {second(last.made_at_s)}, roster {last.roster}"
    if last.roster < roster:
        return Check("backup", "warning", f"{detail}; the roster is {roster} now", hint)
    if now_s - last.made_at_s > OLD_BACKUP_S:
        return Check("backup", "warning", f"{detail}, {span(now_s - last.made_at_s)} old", hint)
    return ok("backup", detail)


def check_new_file(file: Path, directory: Path) -> None:
    """Check that a backup of ``directory`` may be written to ``file``.

    Raises:
        ConfigError: the file exists, or lies in the directory.
    """
    if os.path.lexists(file):
        raise ConfigError(f"{file} exists already", hint="give each backup a name of its own, with the date")
    if file.resolve().is_relative_to(directory.resolve()):
        raise ConfigError(f"{file} lies in the directory that it is a backup of", hint="store it on another disk")


def tell(file: Path, made: Backup, *, as_json: bool) -> None:
    """Print the figures of a backup that was written to ``file``."""
    size = file.stat().st_size
    if as_json:
        figures = {"fleet": made.fleet, "roster": made.roster, "made_at": second(made.made_at_s)}
        say_json({"file": str(file), **figures, "files": len(made.files), "bytes": size})
    else:
        say(f"{file}: fleet {made.fleet}, roster {made.roster}, {len(made.files)} files, {size} bytes")


def decoded(plain: bytes) -> Backup:
    """Return the backup in a message.

    Raises:
        IntegrityError: the message is malformed, or of another version.
    """
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
    """Write a backup's files below ``directory``, a new or an empty one; durable on return.

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
        raise IntegrityError(f"the backup has a file named {name!r}, outside of the directory")
    return path


def files_of(directory: Path, *patterns: str) -> Iterator[BackupFile]:
    """Yield the files of a directory that match a pattern: pattern by pattern, and in the order of their names.

    Raises:
        ConfigError: a file can't be read, or they have more than MAX_BACKUP_BYTES in all.
    """
    total = 0
    for path in (path for pattern in patterns for path in sorted(directory.glob(pattern))):
        # Locks and the unfinished files of a killed program begin with a dot, and no other file does.
        if path.name == LOCK_FILE or path.name.startswith(".") or path.is_dir():
            continue
        data = _read(path, MAX_BACKUP_BYTES - total)
        if data is not None:
            total += len(data)
            yield BackupFile(path.relative_to(directory).as_posix(), data)


def _read(path: Path, most: int) -> bytes | None:
    """Return the bytes of a file; None if a running program has removed it meanwhile."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
            if os.fstat(file.fileno()).st_size > most:
                raise ConfigError(
                    f"the fleet's directory holds more than {MAX_BACKUP_BYTES} bytes",
                    hint="move the files of old runs out of its folder runs",
                )
            return file.read(most)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise read_failed(path, error) from error
