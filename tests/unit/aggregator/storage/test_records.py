"""The records of closed rounds in a database: packed in blocks, read back in order, and damaged."""

import json
import sqlite3
import zlib
from contextlib import closing

import pytest

from aggregator.storage import records
from aggregator.storage.records import BLOCK_ROUNDS, read_after, read_last, write


@pytest.fixture
def database():
    with closing(sqlite3.connect(":memory:", isolation_level=None)) as made:
        made.executescript(records.TABLES)
        yield made


def read(database):
    return list(read_after(database))


def record(round_):
    return {"round": round_, "loss": round_ / 7, "norms": {"dev-1": 1.5}, "device_accuracy": {"dev-1": [3, 4]}}


def without_figures(round_):
    return {**record(round_), "norms": {}, "device_accuracy": {}, "cosines": {}}


def fill(database, count):
    for round_ in range(1, count + 1):
        write(database, round_, record(round_))


def blocks(database):
    return database.execute("SELECT first FROM past ORDER BY first").fetchall()


def test_before_first_round_there_is_nothing(database):
    assert (read(database), read_last(database)) == ([], None)
    bare = {"round": 1, "final": True}
    write(database, 1, bare)
    assert (read(database), read_last(database)) == ([bare], bare), "a record without figures is stored as it is"


def test_earlier_half_is_packed(database):
    """Rounds are stored in full until there are two blocks; then the earlier half lacks the figures of single devices."""
    fill(database, 2 * BLOCK_ROUNDS - 1)
    assert (blocks(database), read(database)) == ([], [record(r) for r in range(1, 2 * BLOCK_ROUNDS)])
    write(database, 2 * BLOCK_ROUNDS, record(2 * BLOCK_ROUNDS))
    assert blocks(database) == [(1,)]
    first = [without_figures(r) for r in range(1, BLOCK_ROUNDS + 1)]
    rest = [record(r) for r in range(BLOCK_ROUNDS + 1, 2 * BLOCK_ROUNDS + 1)]
    assert read(database) == first + rest
    assert read_last(database) == record(2 * BLOCK_ROUNDS)


def test_blocks_are_read_in_order(database):
    """Several blocks are read in the order of their rounds."""
    fill(database, 5 * BLOCK_ROUNDS)
    assert [first for (first,) in blocks(database)] == [1 + BLOCK_ROUNDS * i for i in range(4)]
    assert [r["round"] for r in read(database)] == list(range(1, 5 * BLOCK_ROUNDS + 1))


def test_rewritten_round_replaces_its_record(database):
    """An aggregator that is killed between the snapshot and the record closes the round a second time."""
    fill(database, 3)
    write(database, 3, {**record(3), "loss": 9.0})
    assert [r["loss"] for r in read(database)] == [1 / 7, 2 / 7, 9.0]


def test_record_and_block_are_one_commit(database):
    """A record and the block it fills are one transaction."""
    fill(database, 2 * BLOCK_ROUNDS - 1)
    before = read(database)
    database.execute("BEGIN")
    write(database, 2 * BLOCK_ROUNDS, record(2 * BLOCK_ROUNDS))
    database.execute("ROLLBACK")
    assert read(database) == before
    assert blocks(database) == []


def damage(database, change):
    (block,) = database.execute("SELECT records FROM past").fetchone()
    database.execute("UPDATE past SET records = ?", (change(block),))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda _: b"", "^a block of records is cut short or too large$"),
        (lambda block: block[: len(block) // 2], "^a block of records is cut short or too large$"),
        (lambda _: b"junk", "^a block of records is damaged: "),
        (lambda block: block[:-1] + bytes([block[-1] ^ 1]), "^a block of records is damaged: "),
        (lambda _: zlib.compress(b"{"), "Expecting"),
    ],
    ids=["empty", "half", "junk", "wrong checksum", "no JSON"],
)
def test_damaged_block_keeps_the_last_round(database, change, message):
    """A damaged block is an error and the last round is still read."""
    fill(database, 2 * BLOCK_ROUNDS)
    damage(database, change)
    with pytest.raises(ValueError, match=message):
        read(database)
    assert read_last(database) == record(2 * BLOCK_ROUNDS)


def test_block_is_not_unpacked_too_far(database, monkeypatch):
    """A few damaged bytes could otherwise fill the memory."""
    fill(database, 2 * BLOCK_ROUNDS)
    size = len("\n".join(json.dumps({"round": r, "loss": r / 7}) for r in range(1, BLOCK_ROUNDS + 1)))
    monkeypatch.setattr(records, "MAX_BLOCK_BYTES", size)
    assert len(read(database)) == 2 * BLOCK_ROUNDS
    monkeypatch.setattr(records, "MAX_BLOCK_BYTES", size - 1)
    with pytest.raises(ValueError, match=r"^a block of records is cut short or too large$"):
        read(database)


@pytest.mark.parametrize("rounds", [0, 3, 5 * BLOCK_ROUNDS])
@pytest.mark.parametrize("count", [1, 2, BLOCK_ROUNDS + 9, 10 * BLOCK_ROUNDS])
def test_last_rounds_are_found_anywhere(database, rounds, count):
    """The last rounds are found in rows and in blocks."""
    fill(database, rounds)
    assert records.read_latest(database, count) == read(database)[-count:]


@pytest.mark.parametrize(
    "after", [0, 1, BLOCK_ROUNDS - 1, BLOCK_ROUNDS, BLOCK_ROUNDS + 1, 3 * BLOCK_ROUNDS + 5, 4 * BLOCK_ROUNDS]
)
def test_rounds_after_one_are_all_later(database, after):
    """The rounds after one are those of all rounds."""
    fill(database, 4 * BLOCK_ROUNDS)
    assert list(read_after(database, after)) == read(database)[after:]


def test_packed_rounds_keep_cosines(database):
    """Packed rounds keep their cosines where the clusters changed."""
    for round_ in range(1, 2 * BLOCK_ROUNDS + 1):
        clusters = {"a": round_ > 9, "b": round_ > 20}
        write(
            database,
            round_,
            {**record(round_), "clusters": clusters, "cosines": {"devices": ["a", "b"], "hundredths": "AA"}},
        )
    assert [r["round"] for r in read(database)[:BLOCK_ROUNDS] if r["cosines"]] == [1, 10, 21]
