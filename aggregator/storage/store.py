"""Durable state of a run: SQLite for facts, append-only files for vectors, one group commit for both.

`Store.write` writes an upload's vector and `Store.syncer` makes what is written durable, both on any thread; `Store.commit` then
writes the rows that point at the vectors. An upload may be acknowledged only after it returns. A torn tail of a vector file is
harmless, since no row points at it.

The database grows by one short record a round (records.py). The snapshot of a round deletes, in its own transaction, the
rows of all earlier uploads, and SQLite reuses the freed pages.

`OpenedUpload` is an upload between its last chunk and the disk.

The functions ``read_...`` read a run's directory from another process while the aggregator writes it. They open the database
read-only and never wait for the writer for long: SQLite's write-ahead log lets both work at once.

`readable`, `reads` and `disk_errors` turn errors of files into one error that names the directory. Damaged contents give an
`IntegrityError`. An error of the operating system, such as too many open files, gives a `ConfigError` with the system's own
text: the files may be whole.
"""

from __future__ import annotations

import dataclasses
import errno
import hashlib
import json
import logging
import os
import sqlite3
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from pathlib import Path
from typing import Any, Concatenate, Final, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.parted import PartedVector, VectorSpace
from aggregator.numerics.rows import drop_pages
from aggregator.rounds.snapshot import ResumeMetadata
from aggregator.storage import records
from aggregator.storage.vector_log import FLOAT_BYTES, UpdateFiles, checksum
from aggregator.strategies.base import ClientUpdate, contribution_of
from shoal.errors import DocumentError, IntegrityError, ShoalError, StorageError
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPlan
from shoal.protocol.jobs import NodeKind
from shoal.protocol.messages import Phase, Upload
from shoal.util.files import (
    check_own,
    make_own,
    private_directory,
    read_failed,
    sync_directory,
    write_atomic,
    write_failed,
)
from shoal.util.state_codec import Encoded, decode_state, encode_state

# Decoders of JSON and of our own formats raise any of these on altered bytes.
_DAMAGE: Final = (
    DocumentError,
    sqlite3.DatabaseError,
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    IndexError,
    RecursionError,
)
_SYSTEM_CODES: Final = frozenset(
    {sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_FULL, sqlite3.SQLITE_PERM, sqlite3.SQLITE_READONLY}
)
"""Primary result codes of SQLite for failures of the operating system or the disk, not of the file's contents."""


_DISK: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO})
_SQLITE_DISK: Final = frozenset({sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR})
DISK_HINT: Final = "free some space or check the disk, then start again: the run continues where it stopped"


class _Held(Protocol):
    """An object whose files are in one directory."""

    directory: Path


P = ParamSpec("P")
H = TypeVar("H", bound=_Held)


@contextmanager
def readable(directory: Path) -> Iterator[None]:
    """Map errors raised in the block, which reads a run's files.

    Raises:
        IntegrityError: the files are damaged.
        ConfigError: the operating system failed to read them; a `StorageError` if the failure may be temporary.
    """
    try:
        yield
    except (OSError, *_DAMAGE) as error:
        raise _unreadable(directory, error) from error


@contextmanager
def disk_errors(directory: Path) -> Iterator[None]:
    """Map disk errors raised in the block, which writes to ``directory``; all other errors pass unchanged.

    Raises:
        StorageError: the disk is full or fails.
    """
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK:
            raise
        raise write_failed(directory, error) from error
    except sqlite3.OperationalError as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF not in _SQLITE_DISK:
            raise
        raise StorageError(f"can't write {directory}: {error}", hint=DISK_HINT) from error


def reads(method: Callable[Concatenate[H, P], R]) -> Callable[Concatenate[H, P], R]:
    """Decorate a method that reads the files in its object's ``directory``: map its errors as `readable` does."""

    @wraps(method)
    def read(held: H, /, *args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return method(held, *args, **kwargs)
        except (OSError, *_DAMAGE) as error:
            raise _unreadable(held.directory, error) from error

    return read


def _unreadable(directory: Path, error: Exception) -> ShoalError:
    if isinstance(error, OSError):
        return read_failed(Path(error.filename or directory), error)
    if isinstance(error, sqlite3.OperationalError) and is_system_failure(error):
        return StorageError(
            f"can't read {directory}: {error}",
            hint="check the disk, the permissions and the limit of open files (LimitNOFILE), then start again",
        )
    return IntegrityError(
        f"{directory} can't be read: {type(error).__name__}: {str(error)[:200]}",
        hint="if it is damaged, restore it from a backup, or move it away and sign a new run",
    )


def is_system_failure(error: sqlite3.OperationalError) -> bool:
    """Return whether SQLite failed because of the operating system or the disk, by the low byte of its extended result code."""
    # Errors that the sqlite3 module raises by itself, without a call of SQLite, have no code.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in _SYSTEM_CODES


NOTHING: Final = memoryview(b"")


class UploadRef(NamedTuple):
    """Identity of an upload.

    The transfer id alone is not enough: a device could name the transfer of another.
    """

    device: str
    transfer: bytes


@dataclass(frozen=True, slots=True)
class OpenedUpload:
    """An authentic upload within the plan's limits.

    Attributes:
        header: its header.
        encoded: the header's bytes.
        ref: its identity.
        digest: the hash that its device signed; two uploads with one digest are the same.
        norm: the vector's l2 norm; of an upload in parts 0 until the workers have reported theirs.
        body: the vector as float32 little-endian, whatever its precision on the wire, and any attached bytes after it; without
            the vector if workers hold its parts; empty once it is written, or is not to be.
        start: offset of the vector in the file of its round; None while it is not written.
        checksum: of the vector and the attached bytes, once it is written.
    """

    header: Upload
    encoded: bytes
    ref: UploadRef
    digest: bytes
    norm: float
    body: memoryview = field(default=NOTHING, repr=False)
    start: int | None = None
    checksum: int = 0


SCHEMA_VERSION: Final = 8
DATABASE: Final = "run.sqlite"
UPDATES: Final = "updates"
VECTORS: Final = "vectors"
FLOATS: Final = ".f32"
"""Suffix of a file with a vector of float32."""
SEALED: Final = ".sealed"
"""Suffix of a file with bytes: a checkpoint as its device sealed it."""
BUSY_TIMEOUT_MS: Final = 5000
CHECKED_AT_ONCE: Final = 16
"""Number of stored updates that are checked before their pages are dropped from memory."""
LOG_PAGES: Final = 256
"""Length of the write-ahead log, in pages of 4 KiB, at which SQLite copies it into the database; its default is 4 MB."""
_TABLES: Final = (
    """
CREATE TABLE IF NOT EXISTS facts (name TEXT PRIMARY KEY, value BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS uploads (
  round INTEGER NOT NULL, phase INTEGER NOT NULL, device TEXT NOT NULL, header BLOB NOT NULL,
  digest BLOB NOT NULL, start INTEGER NOT NULL, checksum INTEGER NOT NULL, norm REAL NOT NULL,
  PRIMARY KEY (round, phase, device)) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS snapshot (
  id INTEGER PRIMARY KEY CHECK (id = 1), round INTEGER NOT NULL, head TEXT NOT NULL, state TEXT NOT NULL);
"""
    + records.TABLES
)


@dataclass(frozen=True, slots=True)
class SnapshotHead:
    """A snapshot without the strategy's state.

    Attributes:
        available: devices that were available to the open round.
        metadata: the engine's part.
        vectors: name in the state -> SHA-256 of the vector's bytes in hex, which is also the name of its file.
    """

    available: tuple[str, ...]
    metadata: ResumeMetadata
    vectors: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The state from which a run resumes.

    Attributes:
        round: the open round.
        available: devices that were available to it.
        document, vectors: the strategy's state before it and the models, see `aggregator.rounds.snapshot`.
        metadata: the engine's part.
    """

    round: int
    available: tuple[str, ...]
    document: Any
    vectors: dict[str, NDArray[Any]]
    metadata: ResumeMetadata


class Store:
    """One run's durable state, in one directory.

    Attributes:
        space: the workers that hold the vectors; None if they are here.
    """

    @reads
    def __init__(self, directory: Path, run: RunPlan, seed: Callable[[], bytes] = lambda: os.urandom(16)) -> None:
        """Open or make the run's directory.

        Args:
            directory: its directory; made with mode 0700.
            run: the plan; a directory of another run is refused.
            seed: returns the 16 bytes from which round nonces are derived; called for a new run only.

        Raises:
            IntegrityError: the directory belongs to another run or another version.
        """
        self.directory = private_directory(directory)
        self.run = run
        # SQLite gives its other files the mode of this one, and would open files that another user has put here.
        make_own(directory / DATABASE)
        for suffix in ("-wal", "-shm", "-journal"):
            check_own(directory / f"{DATABASE}{suffix}")
        # Autocommit mode: sqlite3 begins no transaction by itself, and each write below begins its own.
        self._db = sqlite3.connect(directory / DATABASE, isolation_level=None)
        try:
            self.seed = self._prepare(seed)
            self._updates = UpdateFiles(private_directory(directory / UPDATES), self._end_of)
            self._vectors = private_directory(directory / VECTORS)
        except BaseException:
            self._db.close()
            raise
        self.space: VectorSpace | None = None

    def _prepare(self, seed: Callable[[], bytes]) -> bytes:
        """Set the database up, write the run's facts if it is new, and return its seed.

        Raises:
            IntegrityError: the database is that of another run or another version.
        """
        self._db.execute("PRAGMA journal_mode=WAL")
        # An acknowledged upload must survive a power cut; with NORMAL the last commits could be lost.
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
        self._db.execute(f"PRAGMA wal_autocheckpoint={LOG_PAGES}")
        check_version(self._db, self.directory)
        self._db.executescript(_TABLES)
        facts = dict(self._db.execute("SELECT name, value FROM facts"))
        if not facts:
            facts = {"schema": str(SCHEMA_VERSION).encode(), "plan": encode(self.run), "seed": seed()}
            with self._db:
                self._db.execute("BEGIN")
                self._db.executemany("INSERT INTO facts VALUES (?, ?)", list(facts.items()))
        if facts["plan"] != encode(self.run):
            raise IntegrityError(
                f"{self.directory} holds another run",
                hint="a run's directory is never reused: move it away, or sign a new run",
            )
        return bytes(facts["seed"])

    def _end_of(self, round_: int) -> int:
        """Return the length in bytes of a round's file up to the end of its last committed row."""
        found = self._db.execute("SELECT start, header FROM uploads WHERE round = ?", (round_,))
        return max((start + _size(decode(bytes(header), Upload)) for start, header in found), default=0)

    def open_updates(self, round_: int) -> None:
        """Open the file for the vectors of a round, so that `write` takes its uploads; once it is open this does nothing."""
        self._updates.open(round_)

    def write(self, upload: OpenedUpload) -> OpenedUpload:
        """Write an upload's body to its round's file; any thread may call it. Nothing is durable before `commit`.

        Returns:
            what `commit` takes; as before, without ``start``, if the round's file is not open any more.
        """
        body = upload.body
        start = self._updates.append(upload.header.round, body) if len(body) else 0
        cut = FLOAT_BYTES * upload.header.coordinates
        found = checksum(body[:cut]) + checksum(body[cut:])
        return dataclasses.replace(upload, body=NOTHING, start=start, checksum=found)

    def syncer(self) -> Callable[[], None]:
        """Return a function that makes the vectors written so far durable; any thread may call it."""
        return self._updates.syncer()

    def commit(self, uploads: Collection[OpenedUpload]) -> list[ClientUpdate]:
        """Commit written uploads whose vectors are durable, and return them; their vectors are views of the round's file."""
        keys = [(u.header.round, u.header.phase, u.header.device) for u in uploads]
        rows = [(*key, u.encoded, u.digest, u.start, u.checksum, u.norm) for key, u in zip(keys, uploads, strict=True)]
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.executemany("INSERT INTO uploads VALUES (?, ?, ?, ?, ?, ?, ?, ?)", rows)
        return [self._contribution(u.header, u.digest, u.start or 0, u.norm) for u in uploads]

    def _contribution(self, upload: Upload, digest: bytes, start: int, norm: float) -> ClientUpdate:
        vector: Any = None
        attached = memoryview(b"")
        if upload.parts:
            assert self.space is not None, "a run with workers has a space"
            vector = PartedVector(
                self.space, upload.length, NodeKind.UPDATE, device=upload.device, digests=upload.parts
            )
        elif upload.length:
            vector = self._updates.view(upload.round, start, upload.length)
        if upload.attached:
            start += FLOAT_BYTES * upload.coordinates
            attached = memoryview(self._updates.read(upload.round, start, upload.attached))
        return contribution_of(upload, vector, norm, attached, digest)

    def _checked(self, header: bytes, digest: bytes, start: int, kept: int, norm: float) -> ClientUpdate:
        """Return a stored upload after a check of its vector's checksum."""
        upload = decode(header, Upload)
        name = f"the stored update of {upload.device} in round {upload.round}"
        try:
            contribution = self._contribution(upload, digest, start, norm)
        except (FileNotFoundError, ValueError) as error:  # mmap raises ValueError for a file that is too short
            raise IntegrityError(f"{name} is missing or cut short") from error
        here = contribution.vector is not None and not upload.parts
        held = contribution.vector.data.cast("B") if here else b""  # type: ignore[union-attr]
        if checksum(held) + checksum(contribution.attached) != kept:
            raise IntegrityError(f"{name} was altered or is torn")
        return contribution

    @reads
    def uploads(self, round_: int) -> list[ClientUpdate]:
        """Return the durable uploads of a round, in order of device id.

        Raises:
            IntegrityError: the file of an upload is damaged.
        """
        rows = self._db.execute(
            "SELECT header, digest, start, checksum, norm FROM uploads WHERE round = ? ORDER BY device", (round_,)
        )
        found = []
        for header, digest, *place in rows.fetchall():
            found.append(self._checked(bytes(header), bytes(digest), *place))
            if len(found) % CHECKED_AT_ONCE == 0:
                drop_pages([c.vector for c in found[-CHECKED_AT_ONCE:] if c.vector is not None])
        return found

    @reads
    def received(self, round_: int) -> dict[str, tuple[Phase, bytes]]:
        """Return device -> (phase, digest that it signed) of a round's durable uploads, also once their files are erased."""
        found = self._db.execute("SELECT device, phase, digest FROM uploads WHERE round = ? ORDER BY device", (round_,))
        return {device: (Phase(phase), bytes(digest)) for device, phase, digest in found}

    def snapshot(
        self,
        round_: int,
        available: Iterable[str],
        state: Encoded,
        metadata: ResumeMetadata,
        closed: tuple[int, dict[str, Any]] | None = None,
    ) -> None:
        """Make the state before round ``round_`` durable; delete earlier uploads, and vectors to which it does not refer.

        Args:
            round_: the round that opens.
            available: the devices that were available to it.
            state: the strategy's state before it and the models, see `aggregator.rounds.snapshot`.
            metadata: the engine's part.
            closed: number and record of the previous round, written in the same transaction.
        """
        head = SnapshotHead(tuple(available), metadata, self._write_vectors(state))
        row = (round_, json.dumps(encode_state(head).document), json.dumps(state.document))
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            self._db.execute("INSERT OR REPLACE INTO snapshot VALUES (1, ?, ?, ?)", row)
            self._db.execute("DELETE FROM uploads WHERE round < ?", (round_,))
            if closed is not None:
                records.write(self._db, *closed)
        # After the commit: until then the snapshot before may be restored, and needs its files.
        self._sweep(round_, set(head.vectors.values()))

    def _write_vectors(self, state: Encoded) -> dict[str, str]:
        """Make a state's vectors durable; return `SnapshotHead.vectors`."""
        digests = {}
        for name, vector in state.arrays.items():
            is_bytes = vector.dtype == np.uint8
            data = np.ascontiguousarray(vector, np.uint8 if is_bytes else "<f4").data.cast("B")
            digests[name] = _digest(data)
            path = self._vectors / f"{digests[name]}{SEALED if is_bytes else FLOATS}"
            # The name is the digest of the bytes, and only a complete file gets it: an existing one is right.
            if not path.exists():
                # Without its name: the sync of the folder below makes the names of all vectors durable.
                write_atomic(path, data, sync_name=False)
            drop_pages([vector])
        sync_directory(self._vectors)
        return digests

    def _sweep(self, round_: int, digests: set[str]) -> None:
        for path in (*self._vectors.glob(f"*{FLOATS}"), *self._vectors.glob(f"*{SEALED}")):
            if path.stem not in digests:
                path.unlink()
        self._updates.sweep(round_)

    @reads
    def restore(self) -> Snapshot | None:
        """Return the last snapshot, or None if the run has not begun.

        Raises:
            IntegrityError: a vector is missing or altered.
        """
        found = self._db.execute("SELECT round, head, state FROM snapshot").fetchone()
        if found is None:
            return None
        head = _head(found[1])
        read = {digest: self._vector(digest) for digest in set(head.vectors.values())}
        vectors = {name: read[digest] for name, digest in head.vectors.items()}
        return Snapshot(found[0], head.available, json.loads(found[2]), vectors, head.metadata)

    def _vector(self, digest: str) -> NDArray[Any]:
        sealed = self._vectors / f"{digest}{SEALED}"
        path = sealed if sealed.exists() else self._vectors / f"{digest}{FLOATS}"
        data = path.read_bytes() if path.exists() else b""
        if _digest(data) != digest:
            raise IntegrityError(f"{path} is missing or altered", hint="restore the directory from a backup")
        return np.frombuffer(data, np.uint8 if path == sealed else "<f4")

    def record(self, round_: int, record: dict[str, Any]) -> None:
        """Store the record of a closed round."""
        with self._db:
            self._db.execute("BEGIN IMMEDIATE")
            records.write(self._db, round_, record)

    @reads
    def records(self) -> list[dict[str, Any]]:
        """Return the records of the closed rounds in order; packed ones lack the figures of single devices (records.py)."""
        return list(records.read_after(self._db))

    @reads
    def over(self) -> bool:
        """Return whether the final round is recorded."""
        last = records.read_last(self._db)
        return last is not None and bool(last["final"])

    def erase(self) -> None:
        """Erase all client updates after the end of the run; its last snapshot and records stay."""
        self._updates.release()
        erase_updates(self.directory)

    def close(self) -> None:
        """Close files and database."""
        self._updates.release()
        self._db.close()


def check_version(database: sqlite3.Connection, directory: Path) -> None:
    """Check that the database in ``directory`` is new or has this schema version.

    Raises:
        IntegrityError: another version of the aggregator has written it.
    """
    if not database.execute("SELECT 1 FROM sqlite_master WHERE name = 'facts'").fetchone():
        return
    found = database.execute("SELECT value FROM facts WHERE name = 'schema'").fetchone()
    if found is not None and found[0] != str(SCHEMA_VERSION).encode():
        raise IntegrityError(
            f"{directory} was written by another version of shoal-aggregator",
            hint="finish the run with that version, or move the directory away and sign a new run",
        )


def erase_updates(directory: Path) -> None:
    """Erase all client updates in the directory of a finished run."""
    for path in (directory / UPDATES).glob("*.f32"):
        path.unlink()


def _head(text: str) -> SnapshotHead:
    return decode_state(SnapshotHead, json.loads(text), mixed=True)


def _digest(data: bytes | memoryview) -> str:
    return hashlib.sha256(data).hexdigest()


def _size(upload: Upload) -> int:
    return FLOAT_BYTES * upload.coordinates + upload.attached


LOG = logging.getLogger("shoal.aggregator")
R = TypeVar("R")


def read_key_version(directory: Path) -> int | None:
    """Return the key version of a run's last round; None if it has had none."""
    found = _read(directory, lambda reader: reader.execute("SELECT head FROM snapshot").fetchone())
    if found is None:
        return None
    with readable(directory):
        return _head(found[0]).metadata.key_version


def read_records(directory: Path) -> list[dict[str, Any]]:
    """Return the records of a run's closed rounds; empty before the first."""
    return _read(directory, lambda reader: list(records.read_after(reader))) or []


def read_last_record(directory: Path) -> dict[str, Any] | None:
    """Return the record of a run's last closed round; None before the first."""
    return _read(directory, records.read_last)


def read_latest_records(directory: Path, count: int) -> list[dict[str, Any]]:
    """Return the records of a run's last ``count`` closed rounds."""
    return _read(directory, lambda reader: records.read_latest(reader, count)) or []


def take_records(directory: Path, after: int, take: Callable[[dict[str, Any]], None]) -> None:
    """Call ``take`` with the record of each closed round after round ``after``, in order; at most a block is in memory."""

    def query(reader: sqlite3.Connection) -> None:
        for record in records.read_after(reader, after):
            take(record)

    _read(directory, query)


def rounds_closed(directory: Path) -> int:
    """Return the number of a run's last closed round; 0 before the first."""
    last = read_last_record(directory)
    return 0 if last is None else int(last["round"])


def uploads_stored(directory: Path, round_: int) -> int:
    """Return the number of a round's durable uploads."""
    counting = "SELECT COUNT(*) FROM uploads WHERE round = ?"
    found = _read(directory, lambda reader: reader.execute(counting, (round_,)).fetchone())
    return int(found[0]) if found else 0


def stored_vector_bytes(directory: Path) -> int:
    """Return the bytes of the updates of the open round and the one before that are stored in ``directory``.

    It is 0 if workers hold the parts of all updates: their uploads are stored without the vectors.
    """
    found = _read(directory, lambda reader: reader.execute("SELECT COUNT(*), MAX(header) FROM uploads").fetchone())
    if not found or not found[0]:
        return 0
    upload = decode(bytes(found[1]), Upload)
    return FLOAT_BYTES * upload.coordinates * int(found[0])


def read_plan(directory: Path) -> bytes | None:
    """Return the encoded run plan of the run that was started in ``directory``; None if none was."""
    found = _read(directory, lambda reader: reader.execute("SELECT value FROM facts WHERE name = 'plan'").fetchone())
    return None if found is None else found[0]


def _read(directory: Path, query: Callable[[sqlite3.Connection], R]) -> R | None:
    """Return the result of ``query`` on a run's database; None before it has tables.

    Raises:
        IntegrityError: the database is damaged, or of another version.
    """
    path = directory / DATABASE
    if not path.exists():
        return None
    with (
        readable(directory),
        # mode=ro needs the form of a URI; as_uri escapes the characters that have a meaning in one.
        closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True, isolation_level=None)) as reader,
    ):
        try:
            reader.execute(f"PRAGMA busy_timeout={BUSY_TIMEOUT_MS}")
            check_version(reader, directory)
            return query(reader)
        except sqlite3.OperationalError as error:
            if is_system_failure(error):
                raise
            return None  # the writer has not made its tables yet
