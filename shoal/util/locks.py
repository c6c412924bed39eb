"""Directory locks: one program at a time. The kernel releases the lock when the program ends, even if it is killed."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from shoal.errors import ConfigError
from shoal.util.files import open_own, remove_unfinished, write_failed

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
