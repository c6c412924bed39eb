"""The closed rounds of a run in its database: the newest in full, earlier ones packed.

A run may last for tens of thousands of rounds, and its database must stay small. At least the newest `BLOCK_ROUNDS`
rounds are stored in full. Once there are twice as many, the earlier half is packed into one compressed block, without the
figures of single devices (`DEVICE_FIGURES`), which no command prints; `read_after` returns these as empty. The cosines of a round
that changed the clusters stay, since the fleet page shows them.

    rounds  round, record, figures     one row a round: the record as JSON, and the figures of single devices
    past    first, records             one row a block: the records of its rounds, one a line, deflated
"""

from __future__ import annotations

import json
import sqlite3
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, Final

TABLES: Final = """
CREATE TABLE IF NOT EXISTS rounds (round INTEGER PRIMARY KEY, record TEXT NOT NULL, figures TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS past (first INTEGER PRIMARY KEY, records BLOB NOT NULL);
"""
BLOCK_ROUNDS: Final = 64
DEVICE_FIGURES: Final = ("norms", "device_accuracy", "cosines")
MAX_BLOCK_BYTES: Final = 1 << 29
"""Largest block unpacked: the records of 64 rounds of the largest roster."""


def write(database: sqlite3.Connection, round_: int, record: dict[str, Any]) -> None:
    """Store a closed round's record within the caller's transaction, and pack earlier ones if that is due."""
    short = {key: value for key, value in record.items() if key not in DEVICE_FIGURES}
    figures = {key: record[key] for key in DEVICE_FIGURES if key in record}
    row = (round_, json.dumps(short), json.dumps(figures))
    database.execute("INSERT OR REPLACE INTO rounds VALUES (?, ?, ?)", row)
    (count,) = database.execute("SELECT count(*) FROM rounds").fetchone()
    if count >= 2 * BLOCK_ROUNDS:
        _pack(database)


def _pack(database: sqlite3.Connection) -> None:
    oldest = "SELECT round, record, figures FROM rounds ORDER BY round LIMIT ?"
    found = database.execute(oldest, (BLOCK_ROUNDS,)).fetchall()
    block = zlib.compress("\n".join(_shortened([(record, figures) for _, record, figures in found])).encode())
    database.execute("INSERT INTO past VALUES (?, ?)", (found[0][0], block))
    database.execute("DELETE FROM rounds WHERE round <= ?", (found[-1][0],))


def _shortened(rows: Sequence[tuple[str, str]]) -> Iterator[str]:
    """Yield the records of rows (record, figures), with cosines where the clusters differ from those of the row before."""
    before: Any = None
    for text, figures in rows:
        record = json.loads(text)
        clusters = record.get("clusters")
        changed, before = record["round"] == 1 or before not in (None, clusters), clusters
        cosines = json.loads(figures).get("cosines") if changed else None
        yield json.dumps({**record, "cosines": cosines}) if cosines else text


def read_after(database: sqlite3.Connection, after: int = 0) -> Iterator[dict[str, Any]]:
    """Yield the closed rounds after round ``after`` in order, holding the records of one block at a time.

    Raises:
        ValueError, sqlite3.DatabaseError: the database is damaged.
    """
    block = "SELECT coalesce(max(first), 0) FROM past WHERE first <= ?"
    (first,) = database.execute(block, (after + 1,)).fetchone()
    # One statement, since another process may pack rounds between two.
    found = database.execute(
        "SELECT first, records, NULL FROM past WHERE first >= ? "
        "UNION ALL SELECT round, record, figures FROM rounds WHERE round > ? ORDER BY 1",
        (first, after),
    )
    for _, record, figures in found:
        if figures is None:
            closed = ({key: {} for key in DEVICE_FIGURES} | json.loads(line) for line in _unpacked(record).splitlines())
            yield from (closed_round for closed_round in closed if closed_round["round"] > after)
        else:
            yield json.loads(record) | json.loads(figures)


def read_last(database: sqlite3.Connection) -> dict[str, Any] | None:
    """Return the last closed round, which is never packed; None before the first.

    Raises:
        ValueError, sqlite3.DatabaseError: the database is damaged.
    """
    found = database.execute("SELECT record, figures FROM rounds ORDER BY round DESC LIMIT 1").fetchone()
    last: dict[str, Any] | None = None if found is None else json.loads(found[0]) | json.loads(found[1])
    return last


def read_latest(database: sqlite3.Connection, count: int) -> list[dict[str, Any]]:
    """Return the last ``count`` closed rounds in order.

    Raises:
        ValueError, sqlite3.DatabaseError: the database is damaged.
    """
    before = "SELECT round FROM rounds ORDER BY round DESC LIMIT 1 OFFSET ?"
    (after,) = database.execute(before, (count,)).fetchone() or (0,)
    return list(deque(read_after(database, after), maxlen=count))


def _unpacked(block: bytes) -> bytes:
    # With a limit, since a damaged block could unpack to any size.
    unpacking = zlib.decompressobj()
    try:
        records = unpacking.decompress(block, MAX_BLOCK_BYTES)
    except zlib.error as error:
        raise ValueError(f"a block of records is damaged: {error}") from error
    if not unpacking.eof:
        raise ValueError("a block of records is cut short or too large")
    return records
