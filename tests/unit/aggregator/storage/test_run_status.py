"""A run's directory read from another process while the aggregator writes it, and the waiting line for `status`."""

import dataclasses
import json
import sqlite3

import pytest

from aggregator.rounds.resume import ResumeMetadata
from aggregator.storage.run_status import (
    WAITING_FILE,
    forget_waiting,
    keep_waiting,
    read_key_version,
    read_last_record,
    read_plan,
    read_records,
    read_waiting,
    rounds_closed,
    uploads_stored,
)
from aggregator.storage.store import DATABASE, Store
from shoal.errors import IntegrityError
from shoal.protocol.codec import encode
from shoal.util.state_codec import Encoded
from tests.helpers.plans import append_upload, digest_of, engine_of, run_plan, upload_of

RUN = run_plan()
READERS = (read_key_version, read_records, read_last_record, rounds_closed, lambda d: uploads_stored(d, 1), read_plan)
NOTHING = (None, [], None, 0, 0, None)
SHORTAGE = {"missing": [{"device": "dev-1", "since": "12:00"}], "deadline_passed": True}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run-000001"


@pytest.fixture
def store(folder):
    made = Store(folder, RUN)
    yield made
    made.close()


def snapshot(store, key_version=3, round_=1, closed=None):
    store.snapshot(round_, ("dev-1",), Encoded({}), ResumeMetadata(key_version), closed)


def test_a_directory_without_a_run_has_nothing_and_gets_no_file(folder):
    assert tuple(read(folder) for read in READERS) == NOTHING
    folder.mkdir()
    assert tuple(read(folder) for read in READERS) == NOTHING
    assert list(folder.iterdir()) == []


def test_a_database_whose_tables_are_not_made_yet_has_nothing(folder):
    folder.mkdir()
    sqlite3.connect(folder / DATABASE).close()
    (folder / DATABASE).touch()
    assert tuple(read(folder) for read in READERS) == NOTHING


def test_a_run_that_has_not_started_has_its_plan_only(folder, store):
    assert read_plan(folder) == encode(RUN)
    assert tuple(read(folder) for read in READERS[:-1]) == NOTHING[:-1]


def test_closed_rounds_are_read_while_the_store_is_open(folder, store):
    snapshot(store)
    closed = {"round": 1, "final": False, "loss": 0.5}
    snapshot(store, 3, 2, (1, closed))
    assert read_records(folder) == [closed]
    assert read_last_record(folder) == closed
    assert rounds_closed(folder) == 1


def test_only_durable_uploads_of_the_round_are_counted(folder, store):
    engine = engine_of(RUN, store.seed)
    state, _ = engine.begin(("dev-1",))
    state = dataclasses.replace(state, round=1, plan=engine.strategy.plan(state.strategy, 1, ("dev-1",))[1])
    upload, body = upload_of(engine, state, "dev-1")
    append_upload(store, upload, memoryview(body), 1.0, digest_of(upload, body))
    assert uploads_stored(folder, 1) == 0
    store.commit()
    assert [uploads_stored(folder, r) for r in (1, 2)] == [1, 0]


def test_the_key_version_is_that_of_the_last_round(folder, store):
    for version, round_ in ((3, 1), (5, 2)):
        snapshot(store, version, round_)
        assert read_key_version(folder) == version


def test_a_snapshot_head_of_another_form_is_damage(folder, store):
    snapshot(store)
    with sqlite3.connect(folder / DATABASE) as database:
        database.execute("UPDATE snapshot SET head = ?", (json.dumps({"round": 1}),))
    database.close()
    with pytest.raises(IntegrityError, match=r"run-000001 can't be read") as caught:
        read_key_version(folder)
    assert caught.value.hint


def test_a_file_that_is_no_database_is_damage_that_names_the_directory(folder):
    folder.mkdir()
    (folder / DATABASE).write_bytes(b"no database " * 100)
    for read in READERS:
        with pytest.raises(IntegrityError, match=r"run-000001 can't be read"):
            read(folder)


# ------------------------------------------------------------------------------------------------- the waiting line


def test_a_waiting_line_is_read_back_with_the_shortage(folder):
    folder.mkdir()
    assert read_waiting(folder) == ("", None)
    keep_waiting(folder, "round 3: 1 of 2", {})
    assert read_waiting(folder) == ("round 3: 1 of 2", None)
    keep_waiting(folder, "round 3: 1 of 2; missing: dev-1", SHORTAGE)
    assert read_waiting(folder) == ("round 3: 1 of 2; missing: dev-1", SHORTAGE)


def test_an_empty_line_removes_the_file(folder):
    folder.mkdir()
    keep_waiting(folder, "round 3")
    keep_waiting(folder, "")
    assert list(folder.iterdir()) == []
    keep_waiting(folder, "")


def test_a_line_that_can_not_be_written_is_logged_and_stops_no_round(folder, caplog):
    keep_waiting(folder / "missing" / "folder", "round 3")
    assert "the waiting line for status can't be written" in caplog.text


@pytest.mark.parametrize("junk", [b"", b"{", b"[]", b'{"line": "x"}', b"null", b"[" * 100_000, b"\xff"])
def test_a_damaged_waiting_file_is_shown_instead_of_the_line(folder, junk):
    folder.mkdir()
    (folder / WAITING_FILE).write_bytes(junk)
    line, shortage = read_waiting(folder)
    assert line.startswith(f"{folder / WAITING_FILE} is damaged: ")
    assert shortage is None


def test_a_waiting_file_that_can_not_be_read_is_shown_with_the_systems_reason(folder):
    (folder / WAITING_FILE).mkdir(parents=True)
    assert read_waiting(folder) == (f"Is a directory: {folder / WAITING_FILE}", None)


def test_lines_of_a_killed_aggregator_are_removed_from_the_runs_alone(tmp_path):
    runs = [tmp_path / name for name in ("run-000001", "run-000002", "other")]
    for run in runs:
        run.mkdir()
        keep_waiting(run, "round 3")
    forget_waiting(tmp_path)
    assert [read_waiting(run)[0] for run in runs] == ["", "", "round 3"]
