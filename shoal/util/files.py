"""Files that survive a power cut: written beside, flushed, then renamed."""

from __future__ import annotations

import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from shoal.errors import ConfigError, IntegrityError, StorageError, WireError

PRIVATE_FILE_MODE: Final = 0o600
PRIVATE_DIR_MODE: Final = 0o700
PARENT_DIR_MODE: Final = 0o755
"""Of missing directories above a private one: whatever the umask, others must not be able to replace it."""
UNFINISHED_AFTER_S: Final = 60.0
"""A file that was not finished in this time never will be."""
LINK_HINT: Final = "find out who put it there, and remove it"

OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
RANDOM_BYTES: Final = 8
"""Of the name under which a file is first written, so that nobody else can make a file of that name beforehand."""

_PASSING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE})

_TOO_MANY_OPEN: Final = frozenset({errno.EMFILE, errno.ENFILE})

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
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(RANDOM_BYTES)}.{os.getpid()}.new")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except OSError as error:
        raise write_failed(path, error) from error
    try:
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
    """Make renames and unlinks in ``path`` durable.

    Raises:
        ConfigError: the system refuses; a `StorageError` if the disk is full or fails.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
    except OSError as error:
        raise write_failed(path, error) from error


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


def read_failed(path: Path, error: OSError) -> ConfigError:
    """Return the error to raise where ``path`` could not be read, with the system's own text."""
    kind = StorageError if error.errno in _PASSING else ConfigError
    hint = "check that it is there, and whose it is"
    if error.errno in _TOO_MANY_OPEN:
        hint = "too many files are open: raise the limit (LimitNOFILE in the unit, ulimit -n in a shell)"
    elif kind is StorageError:
        hint = "check the disk: the kernel's log (dmesg) says more"
    return kind(f"can't read {path}: {error.strerror or error}", hint=hint)


def read_private(path: Path, *, follow: bool = False) -> bytes:
    """Read a secret, refusing one that other users of the machine can read or have put there.

    Args:
        path: the file.
        follow: read through a link and from a pipe as well: for a file that a person names, and a secret store may link.

    Raises:
        ConfigError: it is missing, a link, another user's, or its mode is wider than 0600.
    """
    try:
        handle = os.open(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW | os.O_NONBLOCK))
        with os.fdopen(handle, "rb") as file:
            _check_private(path, os.fstat(handle), pipe=follow)
            return file.read()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a link, not a file", hint=LINK_HINT) from error
        raise read_failed(path, error) from error


def open_own(path: Path | str) -> int:
    """Return a handle to read and write a private file in place; it is made with mode 0600 where it is missing.

    Raises:
        OSError: it can't be opened or made.
        ConfigError: there is a link, a file with another name besides, or a file that others own or can read.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            return os.open(path, flags | os.O_CREAT | os.O_EXCL, PRIVATE_FILE_MODE)
        except FileExistsError:
            handle = os.open(path, flags)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a link, not a file", hint=LINK_HINT) from error
        raise
    try:
        found = os.fstat(handle)
        _check_own(Path(path), found)
    except ConfigError:
        os.close(handle)
        raise
    return handle


def make_own(path: Path) -> None:
    """Make an empty private file where there is none, for a library that opens it by its name.

    A file that is there is not opened: closing it would drop the locks that this process may hold on it.

    Raises:
        ConfigError: as `open_own`, or it can't be made.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE_FILE_MODE))
    except FileExistsError:
        _check_own(path, path.lstat())
    except OSError as error:
        raise write_failed(path, error) from error


def check_own(path: Path) -> None:
    """Return if nothing has this name, or a private file that `open_own` would open.

    Raises:
        ConfigError: something else has.
    """
    if os.path.lexists(path):
        _check_own(path, path.lstat())


def _check_own(path: Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise ConfigError(f"{path} is a link, not a file", hint=LINK_HINT)
    _check_private(path, found)
    if found.st_nlink > 1:
        raise ConfigError(f"{path} has another name besides (a hard link)", hint=LINK_HINT)


def _check_private(path: Path, found: os.stat_result, *, pipe: bool = False) -> None:
    """Return if a file may hold secrets.

    Raises:
        ConfigError: it is no file, another user's, or readable by others.
    """
    mode = stat.S_IMODE(found.st_mode)
    if not (stat.S_ISREG(found.st_mode) or (pipe and stat.S_ISFIFO(found.st_mode))):
        raise ConfigError(f"{path} is not a file", hint="remove it, and find out who put it there")
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{path} belongs to another user (uid {found.st_uid})",
            hint="find out who put it there; if it is yours, change its owner with chown",
        )
    if mode & 0o077:
        raise ConfigError(f"{path} is readable by others (mode {mode:04o})", hint=f"chmod 600 {path}")


def private_directory(path: Path) -> Path:
    """Make ``path`` with mode 0700 where it is missing, and return it.

    Raises:
        ConfigError: it can't be made, is no directory, or others can write there (see `check_directory`).
    """
    try:
        for parent in reversed(path.parents):
            if not parent.exists():
                parent.mkdir(exist_ok=True, mode=PARENT_DIR_MODE)
        path.mkdir(exist_ok=True, mode=PRIVATE_DIR_MODE)
    except OSError as error:
        raise ConfigError(
            f"can't make the directory {path}: {error.strerror}",
            hint="check that nothing else has this name, and the permissions of the folder that it is to lie in",
        ) from error
    check_directory(path)
    return path


def check_directory(path: Path) -> None:
    """Return if no other user of the machine can put files into ``path``, or another directory in its place.

    A group may write to the directories above it, since some systems give every user a private group; a directory that
    anyone may write to is accepted above it with the sticky bit only, as /tmp has it.

    Raises:
        ConfigError: others can, or it is missing.
    """
    try:
        found = path.stat()
        above = [(parent, parent.stat().st_mode) for parent in path.resolve().parents]
    except OSError as error:
        raise ConfigError(f"can't look at {path}: {error.strerror}", hint="check that it is there") from error
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"the directory {path} belongs to another user (uid {found.st_uid}), who could read and replace its contents",
            hint="use a directory of your own, or run this program as that user",
        )
    if found.st_mode & OTHERS_WRITE:
        raise ConfigError(
            f"others can write to the directory {path} (mode {stat.S_IMODE(found.st_mode):04o})",
            hint=f"look for files in it that are not yours, then: chmod go-w {path}",
        )
    for parent, mode in above:
        if mode & stat.S_IWOTH and not mode & stat.S_ISVTX:
            raise ConfigError(
                f"anyone can replace {path}: {parent} is open to all (mode {stat.S_IMODE(mode):04o})",
                hint=f"use another place, or: chmod o-w {parent}",
            )
