"""The requests that a keeper has answered: one file, replaced as a whole before each answer leaves.

The file is made with the keeper's keys. A keeper without it refuses to serve: it could open a second partition of a round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.errors import IntegrityError, ShoalError
from shoal.protocol.cells import REMEMBERED
from shoal.protocol.codec import U32, Fixed16, Fixed32, decode, encode, message
from shoal.protocol.documents import RunPlan
from shoal.util.files import read_private, write_private

MEMORY_FILE: Final = "opened.bin"


@message(168)
@dataclass(frozen=True, slots=True)
class Opened:
    """A request that was answered: run, round, SHA-256 of the request, and the devices of each cell by a digest of their keys."""

    run: U32
    round: U32
    request: Fixed32
    cells: tuple[tuple[Fixed16, ...], ...]


@message(171)
@dataclass(frozen=True, slots=True)
class LooksUsed:
    """The looks of a run, or of a standing order, that have been used.

    Attributes:
        run_id: of the run, or of the order.
        begun: SHA-256 of the first request of each.
        ended: of the second one; zeros before it.
    """

    run_id: Fixed16 = bytes(16)
    begun: tuple[Fixed32, ...] = ()
    ended: tuple[Fixed32, ...] = ()


@message(169)
@dataclass(frozen=True, slots=True)
class KeeperMemory:
    """The last `REMEMBERED` requests that were answered, of all runs, the newest last; and the newest run's looks."""

    opened: tuple[Opened, ...] = ()
    looks: LooksUsed = LooksUsed()

    @property
    def recent(self) -> list[list[frozenset[bytes]]]:
        """The cells of each of the last requests."""
        return [[frozenset(cell) for cell in one.cells] for one in self.opened]

    def of_run(self, run: int) -> Opened | None:
        """Return the newest request of a run."""
        return next((one for one in reversed(self.opened) if one.run == run), None)

    def opening(self, plan: RunPlan, round_: int, request: bytes, cells: Sequence[frozenset[bytes]]) -> KeeperMemory:
        """Return the memory with a request that is answered now; the same one if it was answered before."""
        before = self.of_run(plan.run)
        if before is not None and before.request == request:
            return self
        new = Opened(plan.run, round_, request, tuple(tuple(sorted(cell)) for cell in cells))
        return dataclasses.replace(self, opened=(*self.opened, new)[-REMEMBERED:])

    def save(self, directory: Path) -> None:
        """Write the memory, durable on return."""
        write_private(directory / MEMORY_FILE, encode(self))

    @classmethod
    def load(cls, directory: Path) -> KeeperMemory:
        """Read what `save` wrote.

        Raises:
            IntegrityError: the file is missing or damaged.
        """
        path = directory / MEMORY_FILE
        try:
            return decode(read_private(path), cls)
        except ShoalError as error:
            raise IntegrityError(
                f"{path} is missing or damaged, so this keeper does not know what it has opened",
                hint="make a keeper with new keys, shoal-keeper init, and have the owner name it in the next run",
            ) from error
