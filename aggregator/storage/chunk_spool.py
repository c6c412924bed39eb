"""A file without a name for chunks of unfinished uploads: a fleet that uploads at once then takes disk, not memory."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import IO, Final

from shoal.errors import IntegrityError

STEP_BYTES: Final = 1024
"""Places have a multiple of this length: chunks of ever other lengths would otherwise never find a place that is free."""


class ChunkSpool:
    """Stores chunks in one file, and uses the places of freed ones again; implements `shoal.protocol.reassembly.Spool`.

    The file appears with the first chunk, has no name, and is gone when the process ends. Nothing in it is ever needed
    after a restart: devices are asked for the chunks again.
    """

    def __init__(self, directory: Path) -> None:
        """Use the disk of ``directory``, which must exist."""
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._end = 0
        self._stored = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def put(self, data: bytes) -> int:
        """Store ``data`` and return where.

        Raises:
            OSError: the disk is full or fails.
        """
        if self._file is None:
            self._file = tempfile.TemporaryFile(dir=self._directory, buffering=0)  # noqa: SIM115 - open until `close`
        room = _room(len(data))
        places = self._free[room]
        at = places[-1] if places else self._end
        view = memoryview(data)
        while view:
            view = view[os.pwrite(self._file.fileno(), view, at + len(data) - len(view)) :]
        if places:
            places.pop()  # not earlier: where the disk fails the place stays free
        self._end = max(self._end, at + room)
        self._stored += 1
        return at

    def take(self, at: int, size: int) -> bytes:
        """Return the ``size`` bytes that `put` stored at ``at``, and free their place.

        Raises:
            OSError: the disk fails.
            IntegrityError: the file has been cut.
        """
        assert self._file is not None, "nothing was stored"
        data = os.pread(self._file.fileno(), size, at)
        if len(data) != size:
            raise IntegrityError(
                f"the chunk spool in {self._directory} holds {len(data)} bytes where {size} were stored"
            )
        self.free(at, size)
        return data

    def free(self, at: int, size: int) -> None:
        """Free the place of ``size`` bytes that `put` stored at ``at``; an empty file gives its blocks back."""
        self._stored -= 1
        if self._stored:
            self._free[_room(size)].append(at)
            return
        self._free.clear()
        self._end = 0
        if self._file is not None:
            os.ftruncate(self._file.fileno(), 0)

    def close(self) -> None:
        """Give the disk blocks back."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _room(size: int) -> int:
    """Return the length of the place for ``size`` bytes."""
    return -(-size // STEP_BYTES) * STEP_BYTES
