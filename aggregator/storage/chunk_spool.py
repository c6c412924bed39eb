"""An unnamed temporary file for chunks of unfinished uploads, so that many uploads at once take disk and not memory."""

from __future__ import annotations

import os
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import IO, Final

from shoal.errors import IntegrityError

STEP_BYTES: Final = 1024
"""Lengths of places are multiples of this, so that chunks of slightly different lengths fit freed places."""


class ChunkSpool:
    """Stores chunks in one file and reuses freed places; implements `shoal.protocol.reassembly.Spool`.

    The file is created with the first chunk and has no name, so the system deletes it when the process ends. After a
    restart devices retransmit the chunks.
    """

    def __init__(self, directory: Path) -> None:
        """Use the disk of ``directory``, which must exist."""
        self._directory = directory
        self._file: IO[bytes] | None = None
        self._end = 0
        self._stored = 0
        self._free: defaultdict[int, list[int]] = defaultdict(list)

    def put(self, data: bytes) -> int:
        """Store ``data`` and return its offset.

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
            places.pop()  # not earlier: if the write fails the place stays free
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
        """Free the place of ``size`` bytes that `put` stored at ``at``; truncate the file if that was the last one."""
        self._stored -= 1
        if self._stored:
            self._free[_room(size)].append(at)
            return
        self._free.clear()
        self._end = 0
        if self._file is not None:
            os.ftruncate(self._file.fileno(), 0)

    def close(self) -> None:
        """Close the file, which frees its disk blocks."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _room(size: int) -> int:
    """Return the length of the place for ``size`` bytes."""
    return -(-size // STEP_BYTES) * STEP_BYTES
