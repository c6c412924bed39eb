"""The daemon's facts on disk: written when they change, at a bounded rate, and never a reason to end."""

import logging
import os

import pytest

from aggregator.status import live_file
from aggregator.status.facts import RunStatus
from aggregator.status.live_file import LIVE_FILE, MOST_PAUSE_S, WRITE_EVERY_S, LiveFile, known_devices, read_live
from aggregator.status.record import ALIVE_EVERY_S
from aggregator.status.watch import FleetWatch
from shoal.errors import StorageError
from shoal.protocol.messages import DeclineReason
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
    assert (facts.version, facts.ended_at_s) == (VERSION, None)
    assert (facts.connection, facts.run) == (watch.connection.facts, RUN)
    assert facts.devices == watch.devices.devices == known_devices(tmp_path)
    assert facts.alive_at_s == int((tmp_path / LIVE_FILE).stat().st_mtime)
    assert (tmp_path / LIVE_FILE).stat().st_mode & 0o777 == 0o600


def test_written_at_a_bounded_rate(tmp_path, watch, file, monkeypatch):
    """It is written at a bounded rate whatever happens."""
    written, looked = [], []
    monkeypatch.setattr(live_file, "PAUSE_PER_COST", 0.0)

    def run():
        looked.append(1)

    for step in range(1000):
        watch.devices.declined(f"dev-{step}", DeclineReason.DATA)
        file.keep_up(run, step * 0.01)
        written.append((tmp_path / LIVE_FILE).stat().st_size)
    assert len(set(written)) == len(looked) == 10 / WRITE_EVERY_S


@pytest.mark.parametrize(("cost_s", "pause_s"), [(0.001, WRITE_EVERY_S), (0.05, 5.0), (9.0, MOST_PAUSE_S)])
def test_slow_writes_make_longer_pauses(tmp_path, watch, file, monkeypatch, cost_s, pause_s):
    """Where a write takes long pauses are longer."""
    times = iter([0.0, cost_s])
    monkeypatch.setattr(live_file, "time", type("Time", (), {"monotonic": staticmethod(lambda: next(times))}))
    file.keep_up(lambda: None, 0.0)
    assert file._pause_s == pytest.approx(pause_s)


def test_changed_connection_does_not_wait(tmp_path, file):
    """A change of connection or run does not wait."""
    file.keep_up(lambda: None, 0.0)
    file.keep_up(lambda: RUN, 0.1)
    assert read_live(tmp_path).run is None
    file.hurry()
    file.keep_up(lambda: RUN, 0.2)
    assert read_live(tmp_path).run == RUN


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
