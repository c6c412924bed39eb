"""A worker's durable state: its parts of updates, its parts of means, and the coordinator's newest order.

Updates lie in one append-only file a round (`aggregator.storage.vector_log`), with a row each in SQLite; a mean is a file of its
own, named by its digest. A part is reported only once file and row are durable.
"""

from __future__ import annotations

import hashlib
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aggregator.storage.vector_log import FLOAT_BYTES, UpdateFiles, checksum
from shoal.errors import IntegrityError
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPlan
from shoal.protocol.jobs import ShardOrder, StoredPart
from shoal.protocol.messages import Phase
from shoal.types import Float32Vector
from shoal.util.files import make_own, private_directory, write_atomic

DATABASE: Final = "parts.sqlite"
PARTS: Final = "parts"
MEANS: Final = "means"
ORDER_FILE: Final = "order.bin"
BUSY_TIMEOUT_MS: Final = 5000
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS parts (
  round INTEGER NOT NULL, device TEXT NOT NULL, phase INTEGER NOT NULL, digest BLOB NOT NULL, start INTEGER NOT NULL,
  checksum INTEGER NOT NULL, squared REAL NOT NULL, PRIMARY KEY (round, device)) WITHOUT ROWID;
"""


@dataclass(frozen=True, slots=True)
class WrittenPart:
    """A part in its round's file, without a committed row yet."""

    round: int
    stored: StoredPart
    start: int
    checksum: int


class PartStore:
    """One worker's state of one run.

    Args:
        directory: of the run; made with mode 0700.
        run: the plan; the directory of another run is refused.
        length: coordinates of this worker's part.

    Raises:
        IntegrityError: the directory belongs to another run.
    """

    def __init__(self, directory: Path, run: RunPlan, length: int) -> None:
        self.directory = private_directory(directory)
        self._length = length
        make_own(directory / DATABASE)
        self._db = sqlite3.connect(directory / DATABASE, isolation_level=None)
        try:
            self._db.execute("PRAGMA journal_mode=WAL")
            self._db.execute("PRAGMA synchronous=FULL")
            self._db.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
            self._db.executescript(_TABLES)
            self._db.execute("INSERT OR IGNORE INTO facts VALUES ('plan', ?)", (encode(run),))
            (plan,) = self._db.execute("SELECT value FROM facts WHERE name = 'plan'").fetchone()
            if plan != encode(run):
                raise IntegrityError(f"{directory} holds another run", hint="move it away, or sign a new run")
            self._files = UpdateFiles(private_directory(directory / PARTS), self._end_of)
            self._means = private_directory(directory / MEANS)
        except BaseException:
            self._db.close()
            raise
        self._batch: dict[tuple[int, str], WrittenPart] = {}

    def _end_of(self, round_: int) -> int:
        found = self._db.execute("SELECT max(start) FROM parts WHERE round = ?", (round_,)).fetchone()[0]
        return 0 if found is None else int(found) + FLOAT_BYTES * self._length

    @property
    def order(self) -> ShardOrder | None:
        """The coordinator's newest order; None before the first."""
        path = self.directory / ORDER_FILE
        return decode(path.read_bytes(), ShardOrder) if path.exists() else None

    def keep_order(self, order: ShardOrder) -> None:
        """Make an order durable, then erase the parts that it says are not needed any more."""
        write_atomic(self.directory / ORDER_FILE, encode(order))
        first = order.round + 1 if order.finished else order.keep
        self._db.execute("DELETE FROM parts WHERE round < ?", (first,))
        self._files.sweep(first)
        if order.finished:
            self._files.release()
            for path in (self.directory / PARTS).glob("*.f32"):
                path.unlink()
        named = {mean.digest.hex() for mean in order.means}
        for path in self._means.glob("[0-9]*-*"):
            round_, _, digest = path.name.partition("-")
            if digest not in named and int(round_) < order.round:
                path.unlink()

    def write(self, round_: int, stored: StoredPart, vector: memoryview) -> None:
        """Append a part, (length,) float32 little-endian, to its round's file; `commit` makes it durable."""
        self._files.open(round_)
        start = self._files.append(round_, vector)
        assert start is not None
        self._batch[(round_, stored.device)] = WrittenPart(round_, stored, start, checksum(vector))

    @property
    def waiting(self) -> bool:
        """Whether any part is written and not durable."""
        return bool(self._batch)

    def commit(self) -> list[tuple[int, StoredPart]]:
        """Make the written parts durable and return them with their rounds."""
        self._files.syncer()()
        rows = [
            (w.round, w.stored.device, w.stored.phase, w.stored.digest, w.start, w.checksum, w.stored.squared_norm)
            for w in self._batch.values()
        ]
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT OR REPLACE INTO parts VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        done = [(w.round, w.stored) for w in self._batch.values()]
        self._batch = {}
        return done

    def stored(self, round_: int, device: str | None = None, digest: bytes | None = None) -> list[StoredPart]:
        """Return the durable parts of a round, of all devices or of one, with any digest or with one."""
        query = "SELECT device, phase, digest, squared FROM parts WHERE round = ?"
        values: list[int | str | bytes] = [round_]
        if device is not None:
            query, values = f"{query} AND device = ?", [*values, device]
        if digest is not None:
            query, values = f"{query} AND digest = ?", [*values, digest]
        found = self._db.execute(f"{query} ORDER BY device", values)
        return [StoredPart(name, Phase(phase), bytes(digest), squared) for name, phase, digest, squared in found]

    def lacking(self, round_: int, devices: Sequence[str], digests: Sequence[bytes]) -> tuple[str, ...]:
        """Return the devices whose part with the digest given is not here."""
        here = {part.device: part.digest for part in self.stored(round_)}
        return tuple(d for d, digest in zip(devices, digests, strict=True) if here.get(d) != digest)

    def reader(self, round_: int) -> Callable[[str], Float32Vector]:
        """Return a function that returns the part of a device in a round, (length,) float32, after a check of its checksum."""
        rows = self._db.execute("SELECT device, start, checksum FROM parts WHERE round = ?", (round_,)).fetchall()
        places = {device: (start, kept) for device, start, kept in rows}

        def read(device: str) -> Float32Vector:
            start, kept = places[device]
            vector = self._files.view(round_, start, self._length)
            if checksum(vector.data.cast("B")) != kept:
                raise IntegrityError(f"the stored part of {device} in round {round_} was altered or is torn")
            return vector

        return read

    def write_mean(self, round_: int, body: bytes) -> bytes:
        """Make a part of a mean durable and return its SHA-256."""
        digest = hashlib.sha256(body).digest()
        path = self._mean(round_, digest)
        if not path.exists():
            write_atomic(path, body)
        return digest

    def mean(self, round_: int, digest: bytes) -> bytes:
        """Return a part of a mean.

        Raises:
            IntegrityError: it is missing or altered.
        """
        path = self._mean(round_, digest)
        body = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(body).digest() != digest:
            raise IntegrityError(f"{path} is missing or altered", hint="restore the directory from a backup")
        return body

    def _mean(self, round_: int, digest: bytes) -> Path:
        return self._means / f"{round_:06d}-{digest.hex()}"

    def close(self) -> None:
        """Close files and database."""
        self._files.release()
        self._db.close()
