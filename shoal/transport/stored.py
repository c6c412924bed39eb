"""Bytes that wait on the disk to be sent again, so that they take no memory."""

from __future__ import annotations

import os
from typing import Final

STORED_FROM_BYTES: Final = 4 << 20
"""Shortest bytes that wait on the disk."""


class Handle:
    """A descriptor that is closed once nothing refers to it any more."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.close(self.number)


class StoredBytes:
    """Bytes in a file, which goes when the program ends if it has no name; slices of them are read by ``bytes()``."""

    def __init__(self, handle: Handle, at: int, size: int) -> None:
        self._handle, self._at, self._size = handle, at, size

    @classmethod
    def of_file(cls, path: str, at: int, size: int) -> StoredBytes:
        """Return a part of a file that has a name; the file must stay as it is while the part is in use."""
        return cls(Handle(os.open(path, os.O_RDONLY | os.O_CLOEXEC)), at, size)

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, part: slice) -> StoredBytes:
        start, stop, _ = part.indices(self._size)
        return StoredBytes(self._handle, self._at + start, max(0, stop - start))

    def __bytes__(self) -> bytes:
        return os.pread(self._handle.number, self._size, self._at)
