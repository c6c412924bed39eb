"""What the aggregator must not forget: SQLite for facts, append-only files for vectors, one group commit for both.

`Store.append` buffers, `Store.commit` makes everything appended so far durable (vectors first, then the rows that
point at them): only after it returns may an upload be acknowledged. A torn tail of a vector file is harmless, since
no row points at it.
"""

from __future__ import annotations

import json
import mmap
import os
import sqlite3
from collections.abc import Callable, Iterable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np

from aggregator.damage import readable, reads
from aggregator.strategies.base import Contribution, Dump, UploadKey, norm_of
from support.files import private_directory, sync_directory, write_atomic
from wire.codec import decode, encode
from wire.documents import RunPlan
from wire.errors import IntegrityError
from wire.messages import Phase, Upload
from wire.types import Float32Vector

SCHEMA_VERSION: Final = 1
BUSY_TIMEOUT_MS: Final = 5000
FLOAT_BYTES: Final = 4
ROUNDS: Final = "[0-9]*.f32"
SPARES: Final = "spare-*.f32"
SPARES_KEPT: Final = 2
"""Files of past rounds that are kept for their disk blocks."""
_TABLES: Final = """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS uploads (
  round INTEGER NOT NULL, phase INTEGER NOT NULL, device TEXT NOT NULL, header BLOB NOT NULL,
  digest BLOB NOT NULL, start INTEGER NOT NULL, checksum INTEGER NOT NULL,
  PRIMARY KEY (round, phase, device)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS rounds (round INTEGER PRIMARY KEY, record TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS snapshot (id INTEGER PRIMARY KEY CHECK (id = 1), round INTEGER NOT NULL, document TEXT NOT
NULL);
"""


def checksum(data: bytes | memoryview) -> int:
    """Return the sum of the 32-bit words of ``data``: it finds torn and zeroed pages, and costs a tenth of a digest.

    Nothing is guarded against whoever can write to the aggregator's disk: he can change the database as well.
    """
    return int(np.frombuffer(data, "<u4").sum(dtype=np.uint64)) & 0x7FFFFFFFFFFFFFFF


@dataclass(frozen=True, slots=True)
class _Row:
    """An upload that is written and not committed."""

    upload: Upload
    digest: bytes
    start: int
    checksum: int
    norm: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The strategy's state before the open round, and the devices that were available to it."""

    round: int
    available: tuple[str, ...]
    document: dict[str, Any]
    vectors: dict[str, Float32Vector]


class Store:
    """One run's durable state, in one directory."""

    @reads
    def __init__(self, directory: Path, run: RunPlan, seed: Callable[[], bytes] = lambda: os.urandom(16)) -> None:
        """Open or make the run's directory.

        Args:
            directory: where it lives; made with mode 0700.
            run: the plan; a directory of another run is refused.
            seed: gives the 16 bytes from which round nonces follow, when the run is new.

        Raises:
            IntegrityError: the directory belongs to another run or another version.
        """
        self.directory = private_directory(directory)
        self.run = run
        private_directory(directory / "updates")
        private_directory(directory / "vectors")
        self._db = sqlite3.connect(directory / "run.sqlite", isolation_level=None)
        (directory / "run.sqlite").chmod(0o600)
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        self._db.executescript(_TABLES)
        self._files: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._dirty: set[int] = set()
        self._pending: list[_Row] = []
        self._batch: list[_Row] = []
        facts = dict(self._db.execute("SELECT name, value FROM facts"))
        if not facts:
            facts = {"schema": str(SCHEMA_VERSION).encode(), "plan": encode(run), "seed": seed()}
            with self._db:
                self._db.execute("BEGIN")
                self._db.executemany("INSERT INTO facts VALUES (?, ?)", list(facts.items()))
        if facts["schema"] != str(SCHEMA_VERSION).encode() or facts["plan"] != encode(run):
            raise IntegrityError(
                f"{directory} holds another run",
                hint="a run's directory is never reused: move it away, or sign a new run",
            )
        self.seed = bytes(facts["seed"])

    def append(self, upload: Upload, vector: memoryview, norm: float, digest: bytes) -> None:
        """Write one upload's vector, and remember the rest; nothing is durable before `commit`.

        Args:
            upload: its header.
            vector: (length,) float32 little-endian, as bytes.
            norm: the vector's l2 norm.
            digest: what the device signed, by which a second upload is told from the same one again.
        """
        start = 0
        if upload.length:
            handle = self._file(upload.round)
            start = self._ends[upload.round]
            view = vector
            while view:
                view = view[os.pwrite(handle, view, self._ends[upload.round]) :]
                self._ends[upload.round] = start + len(vector) - len(view)
            self._dirty.add(upload.round)
        self._pending.append(_Row(upload, digest, start, checksum(vector), norm))

    def prepare(self) -> Callable[[], None]:
        """Close the batch of what was appended so far; return the slow half of its commit, which any thread may run.

        Appending goes on meanwhile, into the next batch. `commit` is due when the returned function has run.
        """
        assert not self._batch, "the batch before is not committed"
        self._batch, self._pending = self._pending, []
        handles = [self._files[round_] for round_ in self._dirty]
        self._dirty.clear()

        def sync() -> None:
            for handle in handles:
                os.fdatasync(handle)

        return sync

    def commit(self) -> list[Contribution]:
        """Make a batch durable, and return it as contributions whose vectors are views of the file.

        The batch is the prepared one, or where there is none all that was appended.
        """
        if not self._batch:
            self.prepare()()
        rows = [
            (r.upload.round, r.upload.phase, r.upload.device, encode(r.upload), r.digest, r.start, r.checksum)
            for r in self._batch
        ]
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT INTO uploads VALUES (?, ?, ?, ?, ?, ?, ?)", rows)
        done = [self._contribution(r.upload, r.start, r.norm) for r in self._batch]
        self._batch = []
        return done

    def _path(self, round_: int) -> Path:
        return self.directory / "updates" / f"{round_:06d}.f32"

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
            ends = [
                start + FLOAT_BYTES * decode(bytes(header), Upload).length
                for start, header in self._db.execute("SELECT start, header FROM uploads WHERE round = ?", (round_,))
            ]
            self._ends[round_] = max(ends, default=0)
        return self._files[round_]

    def _view(self, round_: int, start: int, length: int) -> Float32Vector:
        """Return coordinates of a round's file, (length,) float32, as a view that takes no memory of its own.

        numpy.memmap gives the same for ten times the processor time.
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

    def _contribution(self, upload: Upload, start: int, norm: float | None = None) -> Contribution:
        vector = None
        if upload.length:
            vector = self._view(upload.round, start, upload.length)
        return Contribution(
            upload.round,
            Phase(upload.phase),
            upload.device,
            upload.model,
            upload.samples,
            upload.loss,
            upload.key_id,
            upload.margins,
            upload.correct,
            upload.tested,
            vector,
            norm if norm is not None else 0.0 if vector is None else norm_of(vector),
            upload.model_norm,
        )

    @reads
    def fetch(self, key: UploadKey) -> Contribution:
        """Return a stored upload, its vector checked against the checksum that was kept beside it.

        Raises:
            IntegrityError: it is not there, or the file is damaged.
        """
        return self._fetch(key)[0]

    def _fetch(self, key: UploadKey) -> tuple[Contribution, bytes]:
        found = self._db.execute(
            "SELECT header, digest, start, checksum FROM uploads WHERE round = ? AND phase = ? AND device = ?", key
        ).fetchone()
        if found is None:
            raise IntegrityError(f"the update of {key[2]} in round {key[0]} is not in {self.directory}")
        header, digest, start, kept = found
        upload = decode(bytes(header), Upload)
        try:
            contribution = self._contribution(upload, start)
        except (OSError, ValueError) as error:
            raise IntegrityError(f"the stored update of {key[2]} in round {key[0]} is missing or cut short") from error
        if contribution.vector is not None and checksum(contribution.vector.data.cast("B")) != kept:
            raise IntegrityError(f"the stored update of {key[2]} in round {key[0]} was altered or is torn")
        return contribution, bytes(digest)

    @reads
    def uploads(self, round_: int) -> list[tuple[Contribution, bytes]]:
        """Return the durable uploads of a round with the digests that their devices signed, in order of device id."""
        keys = self._db.execute("SELECT round, phase, device FROM uploads WHERE round = ? ORDER BY device", (round_,))
        return [self._fetch(k) for k in keys.fetchall()]

    def snapshot(
        self, round_: int, available: Iterable[str], dump: Dump, closed: tuple[int, dict[str, Any]] | None = None
    ) -> None:
        """Make the state before round ``round_`` durable, then drop the vectors and updates that nothing needs any more.

        Args:
            round_: the round that is open from now on.
            available: the devices that were available to it.
            dump: the strategy's state before it.
            closed: number and record of the round before, kept in the same transaction.
        """
        kept = {}
        for name, vector in dump.vectors.items():
            path = self.directory / "vectors" / f"{name}.f32"
            data = np.ascontiguousarray(vector, "<f4").data.cast("B")
            if not path.exists():
                write_atomic(path, data, sync_name=False)
            kept[name] = checksum(data)
        sync_directory(self.directory / "vectors")
        document = {"available": list(available), "state": dump.document, "vectors": kept}
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?)", (round_, json.dumps(document)))
            if closed is not None:
                self._db.execute("INSERT OR REPLACE INTO rounds VALUES (?, ?)", (closed[0], json.dumps(closed[1])))
        self._sweep(round_, set(kept), {key[0] for key in dump.uploads})

    def _sweep(self, round_: int, names: set[str], rounds: set[int]) -> None:
        for path in (self.directory / "vectors").glob("*.f32"):
            if path.stem not in names:
                path.unlink()
        updates = self.directory / "updates"
        for path in updates.glob(ROUNDS):
            old = int(path.stem)
            if old < round_ and old not in rounds:
                handle = self._files.pop(old, None)
                if handle is not None:
                    os.close(handle)
                # Writing over allocated blocks takes a third of the time of making new ones durable.
                path.rename(updates / f"spare-{old:06d}.f32")
        for path in sorted(updates.glob(SPARES))[:-SPARES_KEPT]:
            path.unlink()

    @reads
    def restore(self) -> Snapshot | None:
        """Return the last snapshot, or None where the run has not begun.

        Raises:
            IntegrityError: a vector is missing or not what was written.
        """
        found = self._db.execute("SELECT round, document FROM snapshot").fetchone()
        if found is None:
            return None
        document = json.loads(found[1])
        vectors = {}
        for name, kept in document["vectors"].items():
            path = self.directory / "vectors" / f"{name}.f32"
            data = path.read_bytes() if path.exists() else b""
            if len(data) % FLOAT_BYTES or not data or checksum(data) != kept:
                raise IntegrityError(f"{path} is missing or altered", hint="restore the directory from a backup")
            vectors[name] = np.frombuffer(data, "<f4")
        return Snapshot(found[0], tuple(document["available"]), document["state"], vectors)

    def record(self, round_: int, record: dict[str, Any]) -> None:
        """Keep what a closed round brought."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("INSERT OR REPLACE INTO rounds VALUES (?, ?)", (round_, json.dumps(record)))

    @reads
    def records(self) -> list[dict[str, Any]]:
        """Return the closed rounds in order."""
        return [json.loads(r) for (r,) in self._db.execute("SELECT record FROM rounds ORDER BY round")]

    def erase(self) -> None:
        """End the mask epoch: erase every update that devices sent; offsets and records stay."""
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()
        erase_updates(self.directory)

    def close(self) -> None:
        """Close files and database."""
        for handle in self._files.values():
            os.close(handle)
        self._files.clear()
        self._db.close()


def erase_updates(directory: Path) -> None:
    """Erase the updates of a run that is over."""
    for path in (directory / "updates").glob("*.f32"):
        path.unlink()


def read_records(directory: Path) -> list[dict[str, Any]]:
    """Return the closed rounds of a run that another process may be writing; empty where there are none yet.

    Raises:
        IntegrityError: the database is damaged.
    """
    path = directory / "run.sqlite"
    if not path.exists():
        return []
    with (
        readable(directory),
        closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True, isolation_level=None)) as reader,
    ):
        try:
            reader.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
            return [json.loads(r) for (r,) in reader.execute("SELECT record FROM rounds ORDER BY round")]
        except sqlite3.OperationalError:
            return []  # the writer has not made its tables yet
