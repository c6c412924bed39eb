"""Masked updates on disk: one append-only file for each round, read through one memory mapping.

The number of descriptors and mappings does not depend on the size of the fleet. A round's file is extended beyond its
contents, in steps that double, so that its mapping is replaced only a few times while uploads arrive; the surplus takes no
disk blocks. The file of a past round is renamed to a spare, and a later round writes over its blocks.

Any thread may append to a round that is open; all else belongs to the driver's thread. One lock orders appends, the lengthening
of a file and its retirement: a late append must not reach a file that another round has taken over.
"""

from __future__ import annotations

import mmap
import os
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np

from aggregator.numerics.rows import FilePages
from shoal.transport.stored import STORED_FROM_BYTES
from shoal.types import Float32Vector
from shoal.util.files import open_own, sync_directory

FLOAT_BYTES: Final = 4
ROUNDS: Final = "[0-9]*.f32"
SPARES: Final = "spare-*.f32"
SPARES_KEPT: Final = 2
"""Number of spare files: past rounds' files whose disk blocks are used again."""
COPIED_BYTES: Final = 1 << 20
"""Bytes of a copy on the disk that are in memory at a time."""
FIRST_MAPPED_BYTES: Final = 16 << 20
"""Shortest mapping of a file that is still written."""


def on_disk(pieces: Iterable[bytes | memoryview], directory: Path) -> memoryview | None:
    """Return the joined ``pieces``, at least one byte, as a view of an unnamed file on the disk of ``directory``.

    They are in memory only while they are read, until `aggregator.numerics.rows.drop_pages`. None if the disk is full or fails.
    """
    try:
        with tempfile.TemporaryFile(dir=directory) as file:
            file.writelines(pieces)
            file.flush()
            return memoryview(FilePages(file.fileno(), 0, access=mmap.ACCESS_READ))
    except OSError:
        return None


def checksum(data: bytes | memoryview) -> int:
    """Return the sum of the 32-bit words of ``data``, which detects torn and zeroed pages at a tenth of a digest's cost.

    It does not protect from an attacker who can write to the disk and could change the database as well.
    """
    whole = len(data) - len(data) % FLOAT_BYTES
    total = int(np.frombuffer(data[:whole], "<u4").sum(dtype=np.uint64)) + sum(data[whole:])
    # SQLite's integers have 64 bits with a sign.
    return total & 0x7FFFFFFFFFFFFFFF


class UpdateFiles:
    """The files of a run."""

    def __init__(self, directory: Path, end_of: Callable[[int], int]) -> None:
        """Use the existing ``directory``; ``end_of`` returns the length of a round's file up to its last committed row."""
        self._directory = directory
        self._end_of = end_of
        self._files: dict[int, int] = {}
        self._pages: dict[int, FilePages] = {}
        self._ends: dict[int, int] = {}
        self._dirty: set[int] = set()
        self._lock = threading.Lock()

    def open(self, round_: int) -> None:
        """Open a round's file, so that `append` may be called; once it is open this does nothing."""
        if round_ in self._files:
            return
        # The length is asked for outside the lock: it is read from the database.
        end = self._end_of(round_)
        with self._lock:
            self._files[round_] = self._opened(round_)
            # Bytes after the last committed row are a spare's old ones, or the torn tail of a crash: write over them.
            self._ends[round_] = end

    def append(self, round_: int, data: memoryview) -> int | None:
        """Append ``data`` to a round's file and return its offset; any thread may call it.

        Returns:
            None if the round's file is not open, or not open any more. The data are durable once the function that `syncer`
            returns has run.
        """
        with self._lock:
            handle = self._files.get(round_)
            if handle is None:
                return None
            start = self._ends[round_]
            view = data
            while view:
                view = view[os.pwrite(handle, view, self._ends[round_]) :]
                self._ends[round_] = start + len(data) - len(view)
            self._dirty.add(round_)
            return start

    def syncer(self) -> Callable[[], None]:
        """Return a function that makes all appended data durable; any thread may call it."""
        # The handles are listed here, so that the thread that syncs does not touch the dictionaries of the loop.
        with self._lock:
            handles = [self._files[round_] for round_ in self._dirty]
            self._dirty.clear()

        def sync() -> None:
            for handle in handles:
                os.fdatasync(handle)

        return sync

    def _path(self, round_: int) -> Path:
        return self._directory / f"{round_:06d}.f32"

    def _opened(self, round_: int) -> int:
        path = self._path(round_)
        if not path.exists():
            spare = next(path.parent.glob(SPARES), None)
            if spare is not None:
                spare.rename(path)
        handle = open_own(path)
        # `syncer` makes a file's bytes durable, but not its name in the folder.
        sync_directory(path.parent)
        return handle

    def view(self, round_: int, start: int, length: int) -> Float32Vector:
        """Return a vector of a round's file, (length,) float32, as a view of the mapping.

        Raises:
            OSError: the file is missing, or can't be opened or mapped.
            ValueError: the file is too short.
        """
        stop = start + FLOAT_BYTES * length
        pages = self._pages.get(round_)
        if pages is None or len(pages) < stop:
            pages = self._pages[round_] = self._map(round_, stop)
        return np.frombuffer(pages, "<f4", length, start)

    def _map(self, round_: int, stop: int) -> FilePages:
        """Map a round's file, which must be at least ``stop`` bytes long."""
        handle = self._files.get(round_)
        if handle is None:
            with self._path(round_).open("rb") as file:
                return FilePages(file.fileno(), self._size(file.fileno(), stop), access=mmap.ACCESS_READ)
        # Under the lock: an append between the two calls would be cut off.
        with self._lock:
            size = self._size(handle, stop)
            roomy = max(FIRST_MAPPED_BYTES, 2 * stop)
            if size < roomy:
                os.ftruncate(handle, roomy)
        return FilePages(handle, max(size, roomy), access=mmap.ACCESS_READ)

    @staticmethod
    def _size(handle: int, least: int) -> int:
        size = os.fstat(handle).st_size
        if size < least:
            raise ValueError(f"a file of {size} bytes where {least} were written")
        return size

    def read(self, round_: int, start: int, length: int) -> bytes | memoryview:
        """Return ``length`` bytes of a round's file from offset ``start``; many are a view of an unnamed copy on the disk.

        Raises:
            OSError: the file is missing.
        """
        with self._path(round_).open("rb") as file:
            file.seek(start)
            if length < STORED_FROM_BYTES:
                return file.read(length)
            pieces = (file.read(min(COPIED_BYTES, length - at)) for at in range(0, length, COPIED_BYTES))
            return on_disk(pieces, self._directory) or os.pread(file.fileno(), length, start)

    def sweep(self, before: int) -> None:
        """Retire the files of rounds before ``before``; views of them are invalid afterwards."""
        for path in self._directory.glob(ROUNDS):
            old = int(path.stem)
            if old < before:
                self._pages.pop(old, None)
                self._close(old, cut=False)
                # Writing over allocated blocks takes a third of the time of making new ones durable.
                # Not synced: if a power cut undoes the renaming, the next sweep finds the file under its old name.
                path.rename(self._directory / f"spare-{old:06d}.f32")
        for path in sorted(self._directory.glob(SPARES))[:-SPARES_KEPT]:
            path.unlink()

    def release(self) -> None:
        """Truncate all files to their contents and close them."""
        for round_ in list(self._files):
            self._close(round_, cut=True)
        self._pages.clear()

    def _close(self, round_: int, *, cut: bool) -> None:
        """Close a round's file if it is open; ``cut`` truncates it to its contents."""
        with self._lock:
            handle = self._files.pop(round_, None)
            end = self._ends.pop(round_, 0)
            self._dirty.discard(round_)
            if handle is not None:
                if cut:
                    os.ftruncate(handle, end)
                os.close(handle)
