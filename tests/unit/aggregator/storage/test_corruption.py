"""A run's files that something has damaged: an error that names the directory, never a guess and never a bug report."""

import errno
import json
import logging
import os
import resource
import sqlite3
from contextlib import closing, suppress
from pathlib import Path
from unittest.mock import Mock

import pytest

from aggregator.rounds.snapshot import ResumeMetadata
from aggregator.storage.store import Store, read_records
from aggregator.storage.vector_log import UpdateFiles
from shoal.errors import ConfigError, IntegrityError, StorageError
from shoal.util.state_codec import Encoded
from tests.helpers.fleets import make_fleet
from tests.helpers.plans import (
    KEY_VERSION,
    append_upload,
    commit_uploads,
    digest_of,
    engine_of,
    resumed,
    run_plan,
    upload_of,
)

RUN = run_plan()


@pytest.fixture
def folder(tmp_path):
    """The directory of a run that has closed a round and has a snapshot."""
    with closing(Store(tmp_path / "run", RUN)) as store:
        store.record(1, {"round": 1, "final": False})
        store.snapshot(2, (), Encoded({}), ResumeMetadata(KEY_VERSION))
    return tmp_path / "run"


def change(folder, statement, *values):
    with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as database:
        database.execute(statement, values)


@pytest.mark.parametrize("junk", [b"", b"not a database at all, but long enough for a header" * 9])
def test_a_file_that_is_no_database_is_told(folder, junk):
    """An empty one is a new one; anything else is refused with what to do."""
    for path in folder.glob("run.sqlite*"):
        path.unlink()
    (folder / "run.sqlite").write_bytes(junk)
    (folder / "run.sqlite").chmod(0o600)
    if not junk:
        Store(folder, RUN).close()
        return
    for read in (lambda: Store(folder, RUN), lambda: read_records(folder)):
        with pytest.raises(IntegrityError, match="can't be read: DatabaseError") as caught:
            read()
        assert str(folder) in str(caught.value)
        assert "restore it from a backup" in caught.value.hint


@pytest.mark.parametrize("head", ["", "{half", "5", '{"available": []}', "[" * 10**5])
def test_a_damaged_snapshot_is_refused(folder, head):
    change(folder, "UPDATE snapshot SET head = ?", head)
    with closing(Store(folder, RUN)) as store, pytest.raises(IntegrityError, match="can't be read"):
        store.restore()


def test_a_record_that_is_none_is_told(folder):
    change(folder, "UPDATE rounds SET record = ?", "{half")
    with closing(Store(folder, RUN)) as store:
        for read in (store.records, lambda: read_records(folder)):
            with pytest.raises(IntegrityError, match="can't be read: JSONDecodeError"):
                read()


def test_missing_facts_are_told(folder):
    change(folder, "DELETE FROM facts WHERE name = 'seed'")
    with pytest.raises(IntegrityError, match="can't be read: KeyError"):
        Store(folder, RUN)


def test_broken_strategy_state_is_told(tmp_path):
    """The JSON is whole and one of its keys is missing: the aggregator does not start on it."""
    with make_fleet(tmp_path / "fleet", algorithm="ifca", settings={"k": "2"}) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, 10)
        fleet.kill_aggregator()
        folder = fleet.stage.aggregator_dir / "run-000001"
        with closing(sqlite3.connect(folder / "run.sqlite", isolation_level=None)) as database:
            (text,) = database.execute("SELECT state FROM snapshot").fetchone()
            state = json.loads(text)
            state["strategy"][0].pop("slots")
            database.execute("UPDATE snapshot SET state = ?", (json.dumps(state),))
        with pytest.raises(IntegrityError, match="can't be read: DocumentError: lacks 'slots'"):
            fleet.revive_aggregator()


@pytest.mark.parametrize("ledger", [b"", b"{half", b"5", b"[1]", b"\xff\xfe", b"[" * 10**5])
def test_damaged_topics_stop_nothing(tmp_path, caplog, ledger):
    """All that is lost is what an earlier life has left on the broker; the run goes on to its end."""
    with make_fleet(tmp_path / "fleet") as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, 10)
        fleet.kill_aggregator()
        path = fleet.stage.aggregator_dir / "retained.json"
        assert len(json.loads(path.read_bytes())) >= 3
        path.write_bytes(ledger)
        with caplog.at_level(logging.WARNING):
            fleet.revive_aggregator()
        assert "the list of retained topics is damaged" in caplog.text
        assert fleet.run(30)[-1]["final"]
        assert len(json.loads(path.read_bytes())) >= 3


@pytest.mark.parametrize("number", [errno.EMFILE, errno.ENFILE, errno.EIO, errno.EACCES])
def test_system_error_stays_itself(tmp_path, monkeypatch, number):
    """A server with too many open files was told that its updates were missing or cut short."""
    store = Store(tmp_path / "run", RUN)
    engine = engine_of(RUN)
    header, body = upload_of(engine, resumed(engine, ("dev-1",)), "dev-1")
    append_upload(store, header, memoryview(body), 1.0, digest_of(header, body))
    commit_uploads(store)

    monkeypatch.setattr(UpdateFiles, "view", Mock(side_effect=OSError(number, os.strerror(number))))
    with pytest.raises(ConfigError) as refused:
        store.uploads(1)
    assert os.strerror(number) in str(refused.value)
    assert refused.value.exit_code == (3 if number == errno.EACCES else 9)
    assert ("LimitNOFILE" in refused.value.hint) == (number in (errno.EMFILE, errno.ENFILE))
    store.close()


def test_unopened_database_is_not_damaged(folder):
    """It is tried with no descriptor left, as in a server with more devices than its limit of open files allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (sum(1 for _ in Path("/proc/self/fd").iterdir()) + 8, hard))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        with pytest.raises(StorageError, match="unable to open database file") as refused:
            read_records(folder)
    finally:
        for handle in taken:
            os.close(handle)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "LimitNOFILE" in refused.value.hint
    assert read_records(folder) == [{"round": 1, "final": False}]
