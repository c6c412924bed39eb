"""Files that survive a power cut: written beside, flushed, then renamed."""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from wire.errors import ConfigError, IntegrityError, StorageError, WireError

PRIVATE_FILE_MODE: Final = 0o600
PRIVATE_DIR_MODE: Final = 0o700
UNFINISHED_AFTER_S: Final = 60.0
"""A file that was not finished in this time never will be."""

_PASSING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE})

_UNFINISHED: Final = re.compile(r"\..+\.(\d+)\.new", re.ASCII)
"""A name that `write_atomic` makes; the number is the writer's process id."""


def write_atomic(
    path: Path, *data: bytes | memoryview, mode: int = PRIVATE_FILE_MODE, durable: bool = True, sync_name: bool = True
) -> None:
    """Replace ``path`` by the pieces of ``data`` so that a reader, or a restart, sees the old bytes or the new, never a mix.

    With ``durable`` the bytes are on disk before it returns, and with ``sync_name`` so is the name; whoever writes several
    files calls `sync_directory` once after the last.

    Raises:
        ConfigError: it can't be written; what was there stays as it is.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.new")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
        try:
            for piece in data:
                view = memoryview(piece).cast("B")
                while view:
                    view = view[os.write(handle, view) :]
            if durable:
                os.fdatasync(handle)
        finally:
            os.close(handle)
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise write_failed(path, error) from error
    if durable and sync_name:
        sync_directory(path.parent)


def remove_unfinished(directory: Path) -> None:
    """Remove what `write_atomic` left below ``directory`` when its program was killed, or the power failed: it may be secret.

    A file that a living program may still be writing stays, and so does one that can't be removed. ``directory`` belongs to a
    program of ours: the caller has made sure of that.
    """
    for folder, _, names in os.walk(directory):
        for name in names:
            named = _UNFINISHED.fullmatch(name)
            if named is not None:
                with suppress(OSError):
                    _remove_unless_alive(Path(folder, name), named[1])


def _remove_unless_alive(path: Path, writer: str) -> None:
    found = path.lstat()
    fresh = time.time() - found.st_mtime < UNFINISHED_AFTER_S
    if stat.S_ISREG(found.st_mode) and not (fresh and writer != str(os.getpid()) and Path("/proc", writer).exists()):
        path.unlink()


def sync_directory(path: Path) -> None:
    """Make renames and unlinks in ``path`` durable."""
    handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_private(path: Path, data: bytes) -> None:
    """Write a secret: mode 0600 in a directory of mode 0700."""
    private_directory(path.parent)
    write_atomic(path, data)


@contextmanager
def named(path: Path, hint: str) -> Iterator[None]:
    """Let an error in the bytes of a file name the file.

    Raises:
        IntegrityError: the bytes are malformed.
    """
    try:
        yield
    except WireError as error:
        raise IntegrityError(f"{path} is damaged, or not what belongs there: {error}", hint=hint) from error


def write_failed(path: Path, error: OSError) -> ConfigError:
    """Return the error to raise where ``path`` could not be written."""
    kind = StorageError if error.errno in _PASSING else ConfigError
    return kind(f"can't write {path}: {error.strerror}", hint="check the folder, its permissions and the space left")


def read_private(path: Path) -> bytes:
    """Read a secret, refusing one that other users of the machine can read.

    Raises:
        ConfigError: it is missing, or its mode is wider than 0600.
    """
    try:
        mode = stat.S_IMODE(path.stat().st_mode)
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"can't read {path}: {error.strerror}", hint="check that it is there, and whose it is"
        ) from error
    if mode & 0o077:
        raise ConfigError(f"{path} is readable by others (mode {mode:04o})", hint=f"chmod 600 {path}")
    return data


def private_directory(path: Path) -> Path:
    """Make ``path`` with mode 0700 where it is missing, and return it.

    Raises:
        ConfigError: it can't be made, or is no directory.
    """
    try:
        path.mkdir(parents=True, exist_ok=True, mode=PRIVATE_DIR_MODE)
    except OSError as error:
        raise ConfigError(
            f"can't make the directory {path}: {error.strerror}",
            hint="check that nothing else has this name, and the permissions of the folder that it is to lie in",
        ) from error
    return path
