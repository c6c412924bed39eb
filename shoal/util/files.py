"""Files that survive a power cut, and private files that other users can neither read nor replace.

A file is written under a temporary name in the same directory, flushed, and renamed, so that its name always leads to the
old bytes or to the new ones. Private files have mode 0600, belong to the user or root, and are not opened through a link
unless a person named them.

`exclusive` and `serving` lock a directory for one program at a time. The kernel releases the lock when the program ends, even
if it is killed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
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
"""Mode of missing directories above a private one: even under a lax umask, others must not be able to replace it."""
UNFINISHED_AFTER_S: Final = 60.0
"""A temporary file older than this is abandoned, even if its writer's process id is in use."""
LINK_HINT: Final = "find out who put it there, and remove it"

CREDENTIALS_VARIABLE: Final = "CREDENTIALS_DIRECTORY"
"""Names the folder of the credentials that systemd hands to a service; only the service's user can enter it."""

OTHERS_WRITE: Final = stat.S_IWGRP | stat.S_IWOTH
RANDOM_BYTES: Final = 8
"""Random bytes in a temporary name, so that other users can't create a file of that name beforehand."""

_PASSING: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EMFILE, errno.ENFILE})

_TOO_MANY_OPEN: Final = frozenset({errno.EMFILE, errno.ENFILE})

_UNFINISHED: Final = re.compile(r"\..+\.(\d+)\.new", re.ASCII)
"""A name that `write_atomic` makes; the number is the writer's process id."""


def write_atomic(
    path: Path, *data: bytes | memoryview, mode: int = PRIVATE_FILE_MODE, durable: bool = True, sync_name: bool = True
) -> None:
    """Replace ``path`` by the pieces of ``data`` so that a reader, or a restart, sees the old bytes or the new, never a mix.

    With ``durable`` the bytes are on disk before it returns, and with ``sync_name`` so is the name. A caller that writes
    several files passes ``sync_name=False`` and calls `sync_directory` once after the last.

    Raises:
        ConfigError: the file can't be written; ``path`` is unchanged then.
    """
    # In the same directory, since a rename is atomic only within a file system.
    temporary = path.with_name(f".{path.name}.{os.urandom(RANDOM_BYTES).hex()}.{os.getpid()}.new")
    try:
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    except OSError as error:
        raise write_failed(path, error) from error
    try:
        try:
            for piece in data:
                view = memoryview(piece).cast("B")
                while view:  # os.write may write only a part
                    view = view[os.write(handle, view) :]
            if durable:
                # Before the renaming: a power cut could otherwise leave an empty file under the new name.
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
    """Remove temporary files below ``directory`` that a killed `write_atomic` has left: they may contain secrets.

    A file that a running program may still be writing is skipped, and so is one that can't be removed. The caller ensures
    that ``directory`` belongs to one of our programs.
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
    """Write a secret file of mode 0600 in a directory of mode 0700, which is made if it is missing."""
    private_directory(path.parent)
    write_atomic(path, data)


@contextmanager
def named(path: Path, hint: str) -> Iterator[None]:
    """Turn a decoding error inside the block into an error that names the file.

    Raises:
        IntegrityError: the bytes are malformed.
    """
    try:
        yield
    except WireError as error:
        raise IntegrityError(f"{path} is damaged, or not what belongs there: {error}", hint=hint) from error


def write_failed(path: Path, error: OSError) -> ConfigError:
    """Return the error to raise after ``path`` could not be written, with the system's own text."""
    kind = StorageError if error.errno in _PASSING else ConfigError
    return kind(f"can't write {path}: {error.strerror}", hint="check the folder, its permissions and the space left")


def read_failed(path: Path, error: OSError) -> ConfigError:
    """Return the error to raise after ``path`` could not be read, with the system's own text."""
    kind = StorageError if error.errno in _PASSING else ConfigError
    hint = "check that it exists, its owner and its permissions"
    if error.errno in _TOO_MANY_OPEN:
        hint = "too many files are open: raise the limit (LimitNOFILE in the unit, ulimit -n in a shell)"
    elif kind is StorageError:
        hint = "check the disk: the kernel's log (dmesg) says more"
    return kind(f"can't read {path}: {error.strerror or error}", hint=hint)


def read_private(path: Path, *, follow: bool = False) -> bytes:
    """Read a secret file; refuse one that other users of the machine can read or have created.

    Args:
        path: the file.
        follow: also read through a link or from a pipe, for a file that a person named and that a secret store may link.

    Raises:
        ConfigError: the file is missing, a link, another user's, or its mode is wider than 0600.
    """
    try:
        # O_NONBLOCK: a named pipe that another user planted must not block us here, before the check below.
        handle = os.open(path, os.O_RDONLY | (0 if follow else os.O_NOFOLLOW | os.O_NONBLOCK))
        with os.fdopen(handle, "rb") as file:
            # The open file is checked, and not the path, at which another user may put another file meanwhile.
            _check_private(path, os.fstat(handle), pipe=follow)
            return file.read()
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise ConfigError(f"{path} is a link, not a file", hint=LINK_HINT) from error
        raise read_failed(path, error) from error


def read_if_there(path: Path) -> bytes | None:
    """Return the bytes of a secret file as `read_private` does; None if it is missing.

    Raises:
        ConfigError: it is a link, another user's, or its mode is wider than 0600.
    """
    try:
        return read_private(path)
    except ConfigError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            return None
        raise


def read_limited(path: Path, most: int) -> bytes:
    """Read a file that a person named, of at most ``most`` bytes.

    Raises:
        ConfigError: it can't be read, or is larger.
    """
    try:
        with path.open("rb") as file:
            data = file.read(most + 1)
    except OSError as error:
        raise read_failed(path, error) from error
    if len(data) > most:
        raise ConfigError(f"{path} has more than {most} bytes", hint="is it the right file?")
    return data


def free_bytes(directory: Path) -> int:
    """Return the free space of the disk that a directory is on.

    Raises:
        OSError: the directory is missing, or the system does not say.
    """
    room = os.statvfs(directory)
    return room.f_bavail * room.f_frsize


def free_bytes_of(directory: Path) -> int | None:
    """Return the free space for a directory in bytes; None if it can't be read."""
    try:
        return free_bytes(directory)
    except OSError:
        return None


def open_own(path: Path | str) -> int:
    """Open a private file to read and write in place, and return its descriptor; a missing file is made with mode 0600.

    Raises:
        OSError: the file can't be opened or made.
        ConfigError: the path is a link, has a second hard link, or is a file that others own or can read.
    """
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK
    try:
        try:
            handle = os.open(path, flags)
        except FileNotFoundError:
            try:
                # Exclusively: a file that another user makes in between must not be taken unchecked.
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
    """Make an empty private file unless it exists, for a library that opens it by its name.

    An existing file is not opened, because closing it would drop the locks that this process may hold on it.

    Raises:
        ConfigError: as `open_own`, or the file can't be made.
    """
    try:
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, PRIVATE_FILE_MODE))
    except FileExistsError:
        _check_own(path, path.lstat())
    except OSError as error:
        raise write_failed(path, error) from error


def check_own(path: Path) -> None:
    """Check that ``path`` does not exist, or is a private file that `open_own` would open.

    Raises:
        ConfigError: it is anything else.
    """
    if os.path.lexists(path):
        _check_own(path, path.lstat())


def _check_own(path: Path, found: os.stat_result) -> None:
    if stat.S_ISLNK(found.st_mode):
        raise ConfigError(f"{path} is a link, not a file", hint=LINK_HINT)
    _check_private(path, found)
    if found.st_nlink > 1:
        raise ConfigError(f"{path} has a second name (a hard link)", hint=LINK_HINT)


def _check_private(path: Path, found: os.stat_result, *, pipe: bool = False) -> None:
    """Check that a file may hold secrets; ``pipe`` allows a named pipe.

    Raises:
        ConfigError: it is not a regular file, or another user's, or readable by others.
    """
    mode = stat.S_IMODE(found.st_mode)
    if not (stat.S_ISREG(found.st_mode) or (pipe and stat.S_ISFIFO(found.st_mode))):
        raise ConfigError(f"{path} is not a file", hint="remove it, and find out who put it there")
    # Root may own it, since root can read every file anyway.
    if found.st_uid not in (os.geteuid(), 0):
        raise ConfigError(
            f"{path} belongs to another user (uid {found.st_uid})",
            hint="find out who put it there; if it is yours, change its owner with chown",
        )
    # systemd hands a credential to the service's user by an access list, which the mode shows as the group's right to read.
    allowed = stat.S_IRGRP if str(path.parent) == os.environ.get(CREDENTIALS_VARIABLE) and found.st_uid == 0 else 0
    if mode & 0o077 & ~allowed:
        raise ConfigError(f"{path} is readable by others (mode {mode:04o})", hint=f"chmod 600 {path}")


def private_directory(path: Path) -> Path:
    """Make ``path`` with mode 0700 unless it exists, check it, and return it.

    Raises:
        ConfigError: it can't be made, is no directory, or others can write to it (see `check_directory`).
    """
    try:
        # Not mkdir(parents=True), which would give the parents a mode that depends on the umask.
        for parent in reversed(path.parents):
            if not parent.exists():
                parent.mkdir(exist_ok=True, mode=PARENT_DIR_MODE)
        path.mkdir(exist_ok=True, mode=PRIVATE_DIR_MODE)
    except OSError as error:
        raise ConfigError(
            f"can't make the directory {path}: {error.strerror}",
            hint="check that nothing else has this name, and the permissions of the parent folder",
        ) from error
    check_directory(path)
    return path


def check_directory(path: Path) -> None:
    """Check that no other user of the machine can put files into ``path`` or replace it.

    Directories above it may be group-writable, since some systems give every user a private group. A world-writable one
    above it needs the sticky bit, as /tmp has.

    Raises:
        ConfigError: another user can, or the directory is missing.
    """
    try:
        found = path.stat()
        above = [(parent, parent.stat().st_mode) for parent in path.resolve().parents]
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}", hint="check that it exists") from error
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


LOCK_FILE: Final = ".lock"
POLL_S: Final = 0.02
TAKE_OVER_S: Final = 5.0
"""How long a program that is being replaced may take to end."""


@contextmanager
def exclusive(directory: Path, *, wait_s: float, hint: str) -> Iterator[None]:
    """Hold the lock of ``directory`` inside the block.

    Args:
        directory: an existing directory; the lock is a file in it.
        wait_s: how long to wait for another program.
        hint: advice for the error if the lock is taken.

    Raises:
        ConfigError: another program holds the lock for longer, or the lock file can't be made.
    """
    path = directory / LOCK_FILE
    try:
        handle = open_own(path)
    except OSError as error:
        raise write_failed(path, error) from error
    try:
        _take(handle, directory, time.monotonic() + wait_s, hint)
        yield
    finally:
        # Closing releases the lock, and so does any end of the process: no stale lock is left to remove.
        os.close(handle)


@contextmanager
def serving(directory: Path, *, hint: str) -> Iterator[None]:
    """Hold the lock of ``directory`` for a daemon, after removing files that killed programs left half written.

    Raises:
        ConfigError: another program still holds the lock after TAKE_OVER_S.
    """
    with exclusive(directory, wait_s=TAKE_OVER_S, hint=hint):
        remove_unfinished(directory)
        yield


def in_use(directory: Path) -> bool:
    """Return whether a program holds the lock of ``directory`` now; False if the lock file can't be opened."""
    try:
        handle = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        # Held for a moment only; a program that starts just then tries again after POLL_S.
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _take(handle: int, directory: Path, end_s: float, hint: str) -> None:
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end_s:
                raise ConfigError(f"{directory} is in use by another program", hint=hint) from None
            time.sleep(POLL_S)
        else:
            return
