"""Read a run's directory from another process while the aggregator writes it.

Readers open the database read-only and never wait for the writer for long: SQLite's write-ahead log lets both work at once.
"""

from __future__ import annotations

import json
import logging
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any, TypeVar

from aggregator.storage import records
from aggregator.storage.corruption import is_system_failure, readable
from aggregator.storage.store import BUSY_TIMEOUT_MS, DATABASE, SnapshotHead, check_version
from aggregator.storage.vector_log import FLOAT_BYTES
from shoal.protocol.codec import decode
from shoal.protocol.messages import Upload
from shoal.util.state_codec import decode_state

LOG = logging.getLogger("shoal.aggregator")
R = TypeVar("R")


def read_key_version(directory: Path) -> int | None:
    """Return the key version of a run's last round; None if it has had none."""
    found = _read(directory, lambda reader: reader.execute("SELECT head FROM snapshot").fetchone())
    if found is None:
        return None
    with readable(directory):
        return decode_state(SnapshotHead, json.loads(found[0]), mixed=True).metadata.key_version


def read_records(directory: Path) -> list[dict[str, Any]]:
    """Return the records of a run's closed rounds; empty before the first."""
    return _read(directory, records.read) or []


def read_last_record(directory: Path) -> dict[str, Any] | None:
    """Return the record of a run's last closed round; None before the first."""
    return _read(directory, records.read_last)


def read_latest_records(directory: Path, count: int) -> list[dict[str, Any]]:
    """Return the records of a run's last ``count`` closed rounds, without the figures of single devices."""
    return _read(directory, lambda reader: records.read_latest(reader, count)) or []


def take_records(directory: Path, after: int, take: Callable[[dict[str, Any]], None]) -> None:
    """Call ``take`` with the record of each closed round after round ``after``, in order; at most a block is in memory."""

    def query(reader: sqlite3.Connection) -> None:
        reader.execute("BEGIN")  # one view of the database, which another process may write meanwhile
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
