"""A device's files: written completely or not at all, private, and refused if damaged.

The time since the end of the last run, over restarts.
"""

import math
import stat
from pathlib import Path

import numpy as np
import pytest

from crypto.seal.replay import ReplayWatermark
from edge_client.storage.state import (
    REST_FILE,
    RUN_FILE,
    SAVED_EVERY_S,
    TROUBLE_BYTES,
    TROUBLE_FILE,
    DeviceState,
    OwnModel,
    Rest,
)
from shoal.errors import IntegrityError, StorageError
from shoal.util.files import free_bytes, private_directory, write_private
from tests.helpers.disks import fill, small_disk

MARK = ReplayWatermark(3, 1, 7, b"n" * 16)
THETA = np.arange(5, dtype=np.float32) / 3


@pytest.fixture
def state(tmp_path):
    return DeviceState(private_directory(tmp_path / "device"))


def test_newcomer_has_no_run(state):
    """A device that never took part has no run, and the error of its missing model says what to do."""
    assert state.load_run() is None
    assert state.load_status() is None
    with pytest.raises(IntegrityError, match="no model yet") as caught:
        state.load_model()
    assert "take part" in caught.value.hint


@pytest.mark.parametrize("durable", [True, False])
def test_the_model_comes_back_bit_for_bit(state, durable):
    state.save_model(OwnModel(1, b"r" * 16, 7, 2, THETA), durable=durable)
    again = state.load_model()
    assert (again.run, again.run_id, again.round, again.cluster) == (1, b"r" * 16, 7, 2)
    assert again.theta.dtype == np.float32
    assert np.array_equal(again.theta, THETA)
    again.theta[0] = 1.0


@pytest.mark.parametrize("change", [lambda d: d[:-1], lambda d: d + b"\0", lambda d: d[:10]])
def test_a_damaged_model_is_refused(state, change):
    state.save_model(OwnModel(1, b"r" * 16, 7, 2, THETA), durable=True)
    path = state.directory / "model.bin"
    write_private(path, change(path.read_bytes()))
    with pytest.raises(IntegrityError):
        state.load_model()


def test_run_and_status_come_back(state):
    state.save_run(b"package")
    state.save_status({"round": 3, "accuracy": 0.5})
    assert state.load_run() == b"package"
    assert state.load_status() == {"round": 3, "accuracy": 0.5}
    for junk in (b"{half", b"5", b"[]", b"\xff", b"[" * 10**5):
        (state.directory / "status.json").write_bytes(junk)
        assert state.load_status() is None


def test_removed_file_is_missing(state, monkeypatch):
    """`shoal-edge predict` beside `shoal-edge run`: a file is removed between the check and the read."""
    state.save_run(b"package")
    monkeypatch.setattr(Path, "exists", lambda _: True)
    assert state.load_run() == b"package"
    (state.directory / RUN_FILE).unlink()
    assert state.load_run() is None


def test_every_file_is_private(state):
    state.pending.save(MARK, b"t" * 16, b"")
    state.save_model(OwnModel(1, b"r" * 16, 7, 2, THETA), durable=False)
    state.save_run(b"package")
    state.save_status({})
    files = sorted(p.name for p in state.directory.iterdir())
    assert files == ["model.bin", "pending.0.bin", "run.package", "status.json"]
    assert {stat.S_IMODE(p.stat().st_mode) for p in state.directory.iterdir()} == {0o600}


def test_reason_is_noted_on_a_full_disk(tmp_path):
    """The error is written over existing bytes."""
    error = StorageError("can't write x: No space left on device", hint="free some space")
    with small_disk(tmp_path / "disk", mib=1) as place:
        state = DeviceState(place)
        state.clear_trouble()
        assert state.load_trouble() is None
        fill(place)
        assert free_bytes(place) == 0
        with pytest.raises(StorageError):
            state.save_status({"stage": "working"})
        state.save_trouble(error, "2026-11-22T16:00:00Z")
        assert state.load_trouble() == {"error": str(error), "hint": error.hint, "at": "2026-11-22T16:00:00Z"}
        state.clear_trouble()
        assert state.load_trouble() is None


def test_failed_note_hides_nothing(tmp_path):
    """A note that can t be written or read hides nothing."""
    state = DeviceState(tmp_path)
    state.save_trouble(StorageError("no room"), "now")  # the error that it is about is under way
    assert state.load_trouble() is None
    (tmp_path / TROUBLE_FILE).write_bytes(b"{half")
    assert state.load_trouble() is None
    state.clear_trouble()
    assert (tmp_path / TROUBLE_FILE).read_bytes() == b" " * TROUBLE_BYTES


def test_a_long_text_fits_the_note(tmp_path):
    state = DeviceState(tmp_path)
    state.clear_trouble()
    state.save_trouble(StorageError("\x01" * 5000, hint="\x02" * 5000), "now")
    assert len(state.load_trouble()["error"]) > 100
    assert (tmp_path / TROUBLE_FILE).stat().st_size == TROUBLE_BYTES


def test_time_while_the_program_runs_counts(tmp_path):
    rest = Rest(tmp_path)
    assert rest.seconds(5.0) == math.inf, "no run has ended yet"
    rest.keep_up(5.0)
    assert not (tmp_path / REST_FILE).exists()
    rest.begin(100.0)
    assert rest.seconds(130.0) == 30.0
    rest.keep_up(100.0 + SAVED_EVERY_S)
    again = Rest(tmp_path)
    assert again.seconds(9e9) == SAVED_EVERY_S, "the clock of another start says nothing"
    again.keep_up(7.0)
    assert again.seconds(17.0) == SAVED_EVERY_S + 10.0


def test_a_crash_loses_what_was_not_saved(tmp_path):
    rest = Rest(tmp_path)
    rest.begin(0.0)
    rest.keep_up(SAVED_EVERY_S - 1)
    assert Rest(tmp_path).seconds(0.0) == 0.0
    rest.keep_up(SAVED_EVERY_S - 1, closing=True)
    assert Rest(tmp_path).seconds(0.0) == SAVED_EVERY_S - 1


def test_a_damaged_file_delays(tmp_path):
    write_private(tmp_path / REST_FILE, b"-1e9")
    assert Rest(tmp_path).seconds(0.0) == 0.0
