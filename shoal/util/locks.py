"""One program at a time in a directory, for as long as it lives: the kernel lets go when a program is killed."""

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
    """Keep every other program that asks for ``directory`` out of it.

    Args:
        directory: exists; the lock is a file in it.
        wait_s: how long another program may take.
        hint: for whoever finds it taken.

    Raises:
        ConfigError: another program has it, or the lock file can't be made.
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
        os.close(handle)


@contextmanager
def serving(directory: Path, *, hint: str) -> Iterator[None]:
    """Keep ``directory`` for a program that serves it, free of what killed ones have left half written; see `exclusive`.

    Raises:
        ConfigError: another program serves it for TAKE_OVER_S more.
    """
    with exclusive(directory, wait_s=TAKE_OVER_S, hint=hint):
        remove_unfinished(directory)
        yield


def in_use(directory: Path) -> bool:
    """Whether a program serves ``directory`` at the moment; one that can't be told counts as none."""
    try:
        handle = os.open(directory / LOCK_FILE, os.O_RDWR | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
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
