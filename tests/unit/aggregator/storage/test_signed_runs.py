"""A run's file is read once, and again when it was touched; a run that is over is not asked again."""

import gc
import os
import shutil
from pathlib import Path

import pytest

from aggregator.storage import signed_runs as run_files
from aggregator.storage.signed_runs import RunFiles
from aggregator.storage.store import DATABASE, Store
from shoal.errors import ConfigError, UntrustedError, WireError


@pytest.fixture
def reads(monkeypatch):
    """Return the names of the files that were read, in order."""
    names, real = [], Path.read_bytes

    def read(path):
        if path.suffix == ".run":
            names.append(path.name)
        return real(path)

    monkeypatch.setattr(Path, "read_bytes", read)
    return names


def test_unchanged_is_not_read_again(place, reads):
    """What did not change is not read again."""
    plans = [place.sign(), place.sign()]
    reads.clear()
    complaints = []
    files = RunFiles(place.member, lambda *told: complaints.append(told))
    (place.server / "runs/junk.run").write_bytes(b"junk")
    for _ in range(3):
        assert [run.plan for run in files.all()] == plans
    assert sorted(reads) == ["000001.run", "000002.run", "junk.run"]
    assert [name for name, _ in complaints] == ["junk.run"] * 3


def test_file_that_is_replaced_is_read_again(place):
    first = place.sign()
    path = place.server / "runs/000001.run"
    files = RunFiles(place.member)
    (run,) = files.all()
    assert files.package(run) == path.read_bytes()
    again = place.sign(run=first.run, rounds=5)
    os.utime(path, ns=(0, 0))
    with pytest.raises(UntrustedError, match="another run than before"):
        files.package(run)
    (run,) = files.all()
    assert run.plan == again
    assert files.package(run) == path.read_bytes()
    path.unlink()
    assert files.all() == []


@pytest.mark.parametrize("what", ["gone", "torn"])
def test_file_went_bad_since(place, what):
    """A file that went bad since it was found."""
    place.sign()
    path = place.server / "runs/000001.run"
    files = RunFiles(place.member, lambda *_: None)
    (run,) = files.all()
    if what == "gone":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(ConfigError if what == "gone" else WireError):
        files.package(run)
    assert files.all() == []


def test_run_that_is_over_is_looked_up_once(place, monkeypatch):
    first, second = place.sign(), place.sign()
    place.finish(first)
    looked, real = [], run_files.is_finished

    def look(member, plan):
        looked.append(plan.run)
        return real(member, plan)

    monkeypatch.setattr(run_files, "is_finished", look)
    files = RunFiles(place.member)
    assert [files.is_over(first) for _ in range(3)] == [True] * 3
    assert [files.is_over(second) for _ in range(2)] == [False] * 2
    assert looked == [1, 2, 2]
    shutil.move(place.directory(first), place.server / "aside")
    assert not files.is_over(first)


def test_rewritten_database_is_read_again(place):
    """A database that is written over is looked up again."""
    plan = place.sign()
    Store(place.directory(plan), plan).close()
    begun = (place.directory(plan) / DATABASE).read_bytes()
    place.finish(plan)
    files = RunFiles(place.member)
    assert files.is_over(plan)
    (place.directory(plan) / DATABASE).write_bytes(begun)
    assert not files.is_over(plan)


def test_file_of_no_run_is_read_once(place):
    """A file that is no run costs nothing more at each look."""
    (place.server / "runs/junk.run").write_bytes(b"junk")
    files = RunFiles(place.member, lambda *_: None)
    files.all()
    gc.collect()
    before = len(gc.get_objects())
    for _ in range(200):
        files.all()
    gc.collect()
    assert len(gc.get_objects()) - before < 100
