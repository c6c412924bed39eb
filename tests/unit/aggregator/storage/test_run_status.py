"""A run's directory read from another process while the aggregator writes it, and the waiting line for `status`."""

import dataclasses
import json
import sqlite3
from contextlib import closing

import pytest

from aggregator.rounds.snapshot import ResumeMetadata
from aggregator.storage.store import (
    DATABASE,
    Store,
    read_key_version,
    read_last_record,
    read_plan,
    read_records,
    rounds_closed,
    uploads_stored,
)
from shoal.errors import IntegrityError
from shoal.protocol.codec import encode
from shoal.util.state_codec import Encoded
from tests.helpers.plans import append_upload, commit_uploads, digest_of, engine_of, run_plan, upload_of

RUN = run_plan()
READERS = (read_key_version, read_records, read_last_record, rounds_closed, lambda d: uploads_stored(d, 1), read_plan)
NOTHING = (None, [], None, 0, 0, None)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run-000001"


@pytest.fixture
def store(folder):
    with closing(Store(folder, RUN)) as made:
        yield made


def snapshot(store, key_version=3, round_=1, closed=None):
    store.snapshot(round_, ("dev-1",), Encoded({}), ResumeMetadata(key_version), closed)


def test_directory_without_run_gets_no_file(folder):
    """A directory without a run has nothing and gets no file."""
    assert tuple(read(folder) for read in READERS) == NOTHING
    folder.mkdir()
    assert tuple(read(folder) for read in READERS) == NOTHING
    assert list(folder.iterdir()) == []


def test_database_without_tables_is_empty(folder):
    """A database whose tables are not made yet has nothing."""
    folder.mkdir()
    sqlite3.connect(folder / DATABASE).close()
    (folder / DATABASE).touch()
    assert tuple(read(folder) for read in READERS) == NOTHING


def test_unstarted_run_has_its_plan_only(folder, store):
    """A run that has not started has its plan only."""
    assert read_plan(folder) == encode(RUN)
    assert tuple(read(folder) for read in READERS[:-1]) == NOTHING[:-1]


def test_rounds_are_read_while_it_is_open(folder, store):
    """Closed rounds are read while the store is open."""
    snapshot(store)
    closed = {"round": 1, "final": False, "loss": 0.5}
    snapshot(store, 3, 2, (1, closed))
    assert read_records(folder) == [closed]
    assert read_last_record(folder) == closed
    assert rounds_closed(folder) == 1


def test_only_durable_uploads_count(folder, store):
    """Only durable uploads of the round are counted."""
    engine = engine_of(RUN, store.seed)
    state, _ = engine.begin(("dev-1",))
    state = dataclasses.replace(state, round=1, plan=engine.strategy.plan(state.strategy, 1, ("dev-1",))[1])
    upload, body = upload_of(engine, state, "dev-1")
    append_upload(store, upload, memoryview(body), 1.0, digest_of(upload, body))
    assert uploads_stored(folder, 1) == 0
    commit_uploads(store)
    assert [uploads_stored(folder, r) for r in (1, 2)] == [1, 0]


def test_key_version_is_that_of_last_round(folder, store):
    for version, round_ in ((3, 1), (5, 2)):
        snapshot(store, version, round_)
        assert read_key_version(folder) == version


def test_other_snapshot_head_is_damage(folder, store):
    """A snapshot head of another form is damage."""
    snapshot(store)
    with sqlite3.connect(folder / DATABASE) as database:
        database.execute("UPDATE snapshot SET head = ?", (json.dumps({"round": 1}),))
    database.close()
    with pytest.raises(IntegrityError, match=r"run-000001 can't be read") as caught:
        read_key_version(folder)
    assert caught.value.hint


def test_no_database_is_named_damage(folder):
    """A file that is no database is damage that names the directory."""
    folder.mkdir()
    (folder / DATABASE).write_bytes(b"no database " * 100)
    for read in READERS:
        with pytest.raises(IntegrityError, match=r"run-000001 can't be read"):
            read(folder)
