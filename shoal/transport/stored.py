"""Bytes that wait on the disk to be sent again, so that they take no memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Final, TypeVar

T = TypeVar("T")

STORED_FROM_BYTES: Final = 4 << 20
"""Shortest bytes that `out_of_memory` moves to a file."""


class _Handle:
    """A descriptor that is closed once nothing refers to it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class StoredBytes:
    """Bytes in a file, which goes when the program ends if it has no name; slices of them are read by ``bytes()``."""

    def __init__(self, handle: _Handle, at: int, size: int) -> None:
        self._handle, self._at, self._size = handle, at, size

    @classmethod
    def of_file(cls, path: str, at: int, size: int) -> StoredBytes:
        """Return a part of a file that has a name; the file must stay as it is while the part is in use."""
        return cls(_Handle(os.open(path, os.O_RDONLY | os.O_CLOEXEC)), at, size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> StoredBytes:
        start, stop, _ = part.indices(self._size)
        return StoredBytes(self._handle, self._at + start, max(0, stop - start))

    def __bytes__(self) -> bytes:
        return os.pread(self._handle.number, self._size, self._at)


def stored(write: Callable[[Callable[[bytes], object]], T], directory: Path) -> tuple[T, StoredBytes]:
    """Return the result of ``write``, and what it passes to the function that it is given, on the disk of ``directory``.

    Raises:
        OSError: the disk is full or fails.
    """
    import tempfile  # a device does not need it

    with tempfile.TemporaryFile(dir=directory) as file:
        found = write(file.write)
        file.flush()
        return found, StoredBytes(_Handle(os.dup(file.fileno())), 0, file.tell())


def out_of_memory(data: bytes, directory: Path) -> bytes | StoredBytes:
    """Return ``data`` from a file on the disk of ``directory``; the same object if it is short, or the disk is full or fails."""
    if len(data) < STORED_FROM_BYTES:
        return data
    try:
        return stored(lambda write: write(data), directory)[1]
    except OSError:
        return data
