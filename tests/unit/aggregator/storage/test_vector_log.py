"""Descriptors, mappings and resident pages of the files that hold a round's updates."""

import errno
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.backend import gram
from aggregator.numerics.rows import RESIDENT_BYTES
from aggregator.storage import vector_log
from aggregator.storage.vector_log import FIRST_MAPPED_BYTES, UpdateFiles
from tests.helpers.processes import memory_bytes

D = 50_000
MANY = 400
"""400 updates of 200 KB: 80 MB, several times what may stay in memory."""


def open_descriptors():
    return len(list(Path("/proc/self/fd").iterdir()))


def row(number):
    return np.full(D, number, np.float32)


@pytest.fixture
def files(tmp_path):
    made = UpdateFiles(tmp_path, lambda _: 0)
    yield made
    made.release()


@pytest.fixture
def files_on_disk():
    """Files on a disk: the kernel counts pages of files in /dev/shm, where tmp_path may be, as shared memory."""
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        made = UpdateFiles(Path(folder), lambda _: 0)
        yield made
        made.release()


def store(files, count, round_=1):
    files.open(round_)
    return [
        files.view(round_, files.append(round_, memoryview(row(number).tobytes()).cast("B")), D)
        for number in range(count)
    ]


def test_descriptors_do_not_grow(files):
    """Descriptors do not grow with the updates."""
    before = open_descriptors()
    views = store(files, MANY)
    assert open_descriptors() - before <= 5
    assert [int(v[-1]) for v in views] == list(range(MANY))


def test_an_old_round_is_mapped_once(files, tmp_path):
    views = store(files, 20)
    files.release()
    before = open_descriptors()
    again = UpdateFiles(tmp_path, lambda _: 20 * 4 * D)
    found = [again.view(1, 4 * D * number, D) for number in range(20)]
    assert open_descriptors() - before == 1
    assert all((a == b).all() for a, b in zip(found, views, strict=True))


@pytest.mark.parametrize("work", ["mean", "gram"])
def test_reading_keeps_few_pages(files_on_disk, work):
    """Reading a round keeps few of its pages in memory."""
    files = files_on_disk
    views = store(files, MANY)
    files.syncer()()
    before, peak = memory_bytes("RssFile"), 0

    class Watched(list):
        def __iter__(self):
            nonlocal peak
            for item in super().__iter__():
                yield item
                peak = max(peak, memory_bytes("RssFile"))

    rows = Watched(views)
    result = weighted_mean(rows, np.ones(MANY)) if work == "mean" else gram(rows)
    assert peak > before
    assert peak - before < 2 * RESIDENT_BYTES
    assert memory_bytes("RssFile") - before < RESIDENT_BYTES
    expected = (MANY - 1) / 2 if work == "mean" else D * 2.0 * 3.0
    assert (result[0] if work == "mean" else result[2, 3]) == pytest.approx(expected)


def test_closed_file_is_as_long_as_its_data(files, tmp_path):
    """A file is as long as what it holds once it is closed."""
    store(files, 2)
    file = tmp_path / "000001.f32"
    assert file.stat().st_size == FIRST_MAPPED_BYTES
    assert file.stat().st_blocks * 512 < FIRST_MAPPED_BYTES
    files.release()
    assert file.stat().st_size == 2 * 4 * D


def test_file_that_was_cut_is_not_lengthened(files, tmp_path):
    store(files, 2)
    files.release()
    os.truncate(tmp_path / "000001.f32", 6 * D)
    again = UpdateFiles(tmp_path, lambda _: 8 * D)
    assert again.view(1, 0, D)[0] == 0
    with pytest.raises(ValueError, match="a file of 300000 bytes where 400000 were written"):
        again.view(1, 4 * D, D)


@pytest.mark.parametrize("full", [False, True])
def test_many_bytes_are_read_from_a_copy(files, monkeypatch, full):
    """The round's file may be written over; on a full disk they are in memory."""
    if full:
        monkeypatch.setattr(tempfile, "TemporaryFile", _no_room)
    monkeypatch.setattr(vector_log, "STORED_FROM_BYTES", 10)
    monkeypatch.setattr(vector_log, "COPIED_BYTES", 7)
    files.open(1)
    files.append(1, memoryview(bytes(range(100))))
    found = files.read(1, 20, 50)
    files.sweep(2)
    files.open(2)
    files.append(2, memoryview(bytes(100)))
    assert bytes(found) == bytes(range(20, 70))
    assert isinstance(found, bytes) == full


def _no_room(**_options):
    raise OSError(errno.ENOSPC, "no space")
