"""The daemon's facts on disk: written when they change, at a bounded rate, and never a reason to end."""

import logging
import os

import pytest

from aggregator.status.facts import RunStatus
from aggregator.status.live_file import LIVE_FILE, WRITE_EVERY_S, LiveFile, known_devices, read_live
from aggregator.status.record import ALIVE_EVERY_S
from aggregator.status.watch import FleetWatch
from shoal.errors import StorageError
from shoal.transport.base import Connected
from shoal.version import VERSION

RUN = RunStatus(
    run=1,
    algorithm="cfl",
    rounds=3,
    phase="round",
    round=2,
    since_s=5,
    deadline_at_s=9,
    quorum=2,
    received=1,
    waiting=("dev-2",),
    advice="wait",
)


@pytest.fixture
def watch():
    return FleetWatch("mqtt://reef:1883", lambda: 7000.0)


@pytest.fixture
def file(tmp_path, watch):
    return LiveFile(tmp_path, watch)


def test_what_is_written_is_read_back(tmp_path, watch, file):
    watch.connection.on_event(Connected(session_present=False))
    watch.devices.uploaded("dev-1")
    file.keep_up(lambda: RUN, 100.0)
    facts = read_live(tmp_path)
    assert (facts.version, facts.started_at_s, facts.ended_at_s) == (VERSION, 7000, None)
    assert (facts.connection, facts.run) == (watch.connection.facts, RUN)
    assert facts.devices == watch.devices.devices == known_devices(tmp_path)
    assert facts.alive_at_s == int((tmp_path / LIVE_FILE).stat().st_mtime)
    assert (tmp_path / LIVE_FILE).stat().st_mode & 0o777 == 0o600


def test_an_unchanged_file_is_only_touched(tmp_path, file):
    file.keep_up(lambda: None, 0.0)
    path = tmp_path / LIVE_FILE
    inode = path.stat().st_ino
    os.utime(path, (1, 1))
    file.keep_up(lambda: None, ALIVE_EVERY_S - 0.1)
    assert path.stat().st_mtime == 1
    file.keep_up(lambda: None, ALIVE_EVERY_S + WRITE_EVERY_S)
    assert path.stat().st_mtime > 1
    assert path.stat().st_ino == inode


def test_a_file_that_was_removed_comes_back(tmp_path, file):
    file.keep_up(lambda: None, 0.0)
    (tmp_path / LIVE_FILE).unlink()
    file.keep_up(lambda: None, 10.0)
    file.keep_up(lambda: None, 20.0)
    assert read_live(tmp_path) is not None


def test_the_end_is_written_with_its_error(tmp_path, file):
    file.keep_up(lambda: RUN, 0.0)
    file.end(StorageError("the disk is full", hint="free some space"))
    facts = read_live(tmp_path)
    assert (facts.ended_at_s, facts.error, facts.hint, facts.run) == (7000, "the disk is full", "free some space", None)
    file.end(None)
    facts = read_live(tmp_path)
    assert (facts.ended_at_s, facts.error, facts.hint) == (7000, "", "")
    file.end(KeyError("x"))
    assert read_live(tmp_path).error == "'x'"


def test_failed_write_is_told_once(tmp_path, watch, file, caplog):
    """A failure to write is told once and tried again."""
    (tmp_path / LIVE_FILE).mkdir()
    for step in range(3):
        file.keep_up(lambda: None, step * 10.0)
    assert [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING] == [
        "the facts for status can't be written"
    ]
    (tmp_path / LIVE_FILE).rmdir()
    file.keep_up(lambda: None, 100.0)
    assert read_live(tmp_path) is not None


@pytest.mark.parametrize("junk", [b"", b"{half", b"[]", b'{"version": "9"}', b"[" * 100_000, b"\xff"])
def test_what_is_no_such_file_counts_as_none(tmp_path, junk):
    (tmp_path / LIVE_FILE).write_bytes(junk)
    assert read_live(tmp_path) is None
    assert known_devices(tmp_path) == {}
