"""Map any error raised while reading a run's files to one error that names the directory.

Damaged contents give an `IntegrityError`. An error of the operating system, such as too many open files, gives a
`ConfigError` with the system's own text: the files may be whole.
"""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Concatenate, Final, ParamSpec, Protocol, TypeVar

from shoal.errors import DocumentError, IntegrityError, ShoalError, StorageError
from shoal.util.files import read_failed, write_failed

# Decoders of JSON and of our own formats raise any of these on altered bytes.
_DAMAGE: Final = (
    DocumentError,
    sqlite3.DatabaseError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RecursionError,
)
_SYSTEM_CODES: Final = frozenset(
    {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY}
)
"""Primary result codes of SQLite for failures of the operating system or the disk, not of the file's contents."""


_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
_SQLITE_DISK: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
DISK_HINT: Final = "free some space or check the disk, then start again: the run continues where it stopped"


class _Held(Protocol):
    """An object whose files are in one directory."""

    directory: Path


P = ParamSpec("P")
R = TypeVar("R")
H = TypeVar("H", bound=_Held)


@contextmanager
def readable(directory: Path) -> Iterator[None]:
    """Map errors raised in the block, which reads a run's files.

    Raises:
        IntegrityError: the files are damaged.
        ConfigError: the operating system failed to read them; a `StorageError` if the failure may be temporary.
    """
    try:
        yield
    except (OSError, *_DAMAGE) as error:
        raise _unreadable(directory, error) from error


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Map disk errors raised in the block, which writes to ``directory``; all other errors pass unchanged.

    Raises:
        StorageError: the disk is full or fails.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise write_failed(directory, error) from error
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _SQLITE_DISK:
            raise
        raise StorageError(f"can't write {directory}: {error}", hint=DISK_HINT) from error


def reads(method: Callable[Concatenate[H, P], R]) -> Callable[Concatenate[H, P], R]:
    """Decorate a method that reads the files in its object's ``directory``: map its errors as `readable` does."""

    @wraps(method)
    def read(held: H, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(held, *args, **kwargs)
        except (OSError, *_DAMAGE) as error:
            raise _unreadable(held.directory, error) from error

    return read


def _unreadable(directory: Path, error: Exception) -> ShoalError:
    if isinstance(error, OSError):
        return read_failed(Path(error.filename or directory), error)
    if isinstance(error, sqlite3.OperationalError) and is_system_failure(error):
        return StorageError(
            f"can't read {directory}: {error}",
            hint="check the disk, the permissions and the limit of open files (LimitNOFILE), then start again",
        )
    return IntegrityError(
        f"{directory} can't be read: {type(error).__name__}: {str(error)[:200]}",
        hint="if it is damaged, restore it from a backup, or move it away and sign a new run",
    )


def is_system_failure(error: sqlite3.OperationalError) -> bool:
    """Return whether SQLite failed because of the operating system or the disk, by the low byte of its extended result code."""
    # Errors that the sqlite3 module raises by itself, without a call of SQLite, have no code.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _SYSTEM_CODES
