"""Masked updates on disk: one append-only file a round, read through maps that take no memory of their own."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import numpy as np

from support.files import sync_directory
from wire.types import Float32Vector

FLOAT_BYTES: Final = 4
ROUNDS: Final = "[0-9]*.f32"
SPARES: Final = "spare-*.f32"
SPARES_KEPT: Final = 2
"""Files of past rounds that are kept for their disk blocks."""


def checksum(data: bytes | memoryview) -> int:
    """Return the sum of the 32-bit words of ``data``: it finds torn and zeroed pages, and costs a tenth of a digest.

    Nothing is guarded against whoever can write to the aggregator's disk: he can change the database as well.
    """
    whole = len(data) - len(data) % FLOAT_BYTES
    total = int(np.frombuffer(data[:whole], "<u4").sum(dtype=np.uint64)) + sum(data[whole:])
    return total & 0x7FFFFFFFFFFFFFFF


class UpdateFiles:
    """The files of one mask epoch."""

    def __init__(self, directory: Path, end_of: Callable[[int], int]) -> None:
        """Use ``directory``, which is there; ``end_of`` gives the bytes of a round's file that rows point to."""
        self._directory = directory
        self._end_of = end_of
        self._files: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._dirty: set[int] = set()

    def append(self, round_: int, data: memoryview) -> int:
        """Write ``data`` behind what a round's file holds; return where it begins. Not durable before `syncer` has run."""
        handle = self._file(round_)
        start = self._ends[round_]
        view = data
        while view:
            view = view[os.pwrite(handle, view, self._ends[round_]) :]
            self._ends[round_] = start + len(data) - len(view)
        self._dirty.add(round_)
        return start

    def rewind(self, round_: int) -> None:
        """Let what comes next in a round's file take the place of bytes that no row points to any more."""
        if round_ in self._ends:
            self._ends[round_] = self._end_of(round_)

    def syncer(self) -> Callable[[], None]:
        """Return what makes all that was written so far durable; any thread may run it."""
        handles = [self._files[round_] for round_ in self._dirty]
        self._dirty.clear()

        def sync() -> None:
            for handle in handles:
                os.fdatasync(handle)

        return sync

    def _path(self, round_: int) -> Path:
        return self._directory / f"{round_:06d}.f32"

    def _file(self, round_: int) -> int:
        if round_ not in self._files:
            path = self._path(round_)
            if not path.exists():
                spare = next(path.parent.glob(SPARES), None)
                if spare is not None:
                    spare.rename(path)
            self._files[round_] = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
            sync_directory(path.parent)
            # Bytes behind the last row are a spare's old ones, or the torn tail of a crash: write over them.
            self._ends[round_] = self._end_of(round_)
        return self._files[round_]

    def view(self, round_: int, start: int, length: int) -> Float32Vector:
        """Return coordinates of a round's file, (length,) float32, as a view that takes no memory of its own.

        numpy.memmap gives the same for ten times the processor time.

        Raises:
            OSError, ValueError: the file is missing or too short.
        """
        aligned = start - start % mmap.ALLOCATIONGRANULARITY
        size = start - aligned + FLOAT_BYTES * length
        handle = self._files.get(round_)
        if handle is not None:
            mapped = mmap.mmap(handle, size, access=mmap.ACCESS_READ, offset=aligned)
        else:
            with self._path(round_).open("rb") as file:
                mapped = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ, offset=aligned)
        return np.frombuffer(mapped, "<f4", length, start - aligned)

    def read(self, round_: int, start: int, length: int) -> bytes:
        """Return bytes of a round's file.

        Raises:
            OSError: the file is missing.
        """
        with self._path(round_).open("rb") as file:
            file.seek(start)
            return file.read(length)

    def sweep(self, before: int, needed: Iterable[int]) -> None:
        """Drop the files of rounds before ``before`` that are not ``needed``."""
        keep = set(needed)
        for path in self._directory.glob(ROUNDS):
            old = int(path.stem)
            if old < before and old not in keep:
                handle = self._files.pop(old, None)
                if handle is not None:
                    os.close(handle)
                    self._dirty.discard(old)
                # Writing over allocated blocks takes a third of the time of making new ones durable.
                path.rename(self._directory / f"spare-{old:06d}.f32")
        for path in sorted(self._directory.glob(SPARES))[:-SPARES_KEPT]:
            path.unlink()

    def release(self) -> None:
        """Close all files."""
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()
        self._ends.clear()
