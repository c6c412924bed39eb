"""Files that survive: old bytes or new ones, private from the first moment, and no litter."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import stat
import time
from pathlib import Path

import pytest

from shoal.errors import ConfigError, IntegrityError, StorageError, UntrustedError, WireError
from shoal.util.files import (
    exclusive,
    in_use,
    named,
    private_directory,
    read_limited,
    read_private,
    remove_unfinished,
    sync_directory,
    write_atomic,
    write_failed,
    write_private,
)
from tests.helpers.refusals import refused


def mode(path):
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.parametrize("durable", [True, False])
def test_a_write_replaces_the_whole_file(tmp_path, durable):
    """Pieces are written in order as one file."""
    path = tmp_path / "file"
    for pieces in ([b"first"], [b""], [b"x" * 100_000], [b"head", memoryview(b"body"), b"", b"tail"]):
        write_atomic(path, *pieces, durable=durable)
        assert path.read_bytes() == b"".join(pieces)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    """If the disk fills up half-way, or the rename fails, the old file is unchanged and no temporary file remains."""
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(_handle, _data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        patch.setattr(os, "writev", full)
        with refused(ConfigError, "No space left on device", hint="the space left") as caught:
            write_atomic(path, b"new and longer")
    assert str(caught.value) == f"can't write {path}: No space left on device"
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"
    (tmp_path / "folder" / "inner").mkdir(parents=True)
    with pytest.raises(ConfigError, match="can't write"):
        write_atomic(tmp_path / "folder", b"new")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["file", "folder", "inner"]


def test_short_writes_are_continued(tmp_path, monkeypatch):
    """The kernel may take less than it is given."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, bytes(data[:7])))
    data = bytes(range(256))
    write_atomic(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_are_private_whatever_umask(tmp_path, umask):
    """An existing directory stays as it is: its owner may have chosen the mode on purpose."""
    tmp_path.chmod(0o755)
    before = os.umask(umask)
    try:
        write_private(tmp_path / "keys" / "secret", b"s\0s")
        write_atomic(tmp_path / "keys" / "plain", b"p")
        private_directory(tmp_path / "deep" / "er")
    finally:
        os.umask(before)
    assert mode(tmp_path / "keys") == mode(tmp_path / "deep" / "er") == 0o700
    assert mode(tmp_path / "keys" / "secret") == mode(tmp_path / "keys" / "plain") == 0o600
    assert read_private(tmp_path / "keys" / "secret") == b"s\0s"
    assert private_directory(tmp_path) == tmp_path
    assert mode(tmp_path) == 0o755
    sync_directory(tmp_path)


@pytest.mark.parametrize("wide", [0o610, 0o604, 0o644, 0o666, 0o620, 0o602, 0o601])
def test_reachable_secret_is_refused(tmp_path, wide):
    """A secret that others can reach is refused, and a missing one is named."""
    path = tmp_path / "secret"
    with refused(ConfigError, "No such file", hint="check that it exists"):
        read_private(path)
    write_private(path, b"secret bytes")
    path.chmod(wide)
    with refused(ConfigError, f"{wide:04o}", hint_is=f"chmod 600 {path}") as caught:
        read_private(path)
    assert "secret bytes" not in str(caught.value)


def unfinished(folder, writer, *, old=False):
    path = folder / f".secret.{writer}.new"
    path.write_bytes(b"half")
    if old:
        os.utime(path, (0, 0))
    return path


def test_unfinished_files_are_removed(tmp_path):
    """Files of this program, of one that has ended, and old ones of any program; in subdirectories too."""
    below = tmp_path / "below"
    below.mkdir()
    gone = [
        unfinished(tmp_path, os.getpid()),
        unfinished(tmp_path, 2**22 + 1),
        unfinished(below, os.getppid(), old=True),
    ]
    kept = [unfinished(tmp_path, os.getppid()), tmp_path / "run.new", tmp_path / ".hidden"]
    for path in kept[1:]:
        path.write_bytes(b"whole")
    remove_unfinished(tmp_path)
    assert not any(path.exists() for path in gone)
    assert all(path.exists() for path in kept)


@pytest.mark.parametrize("name", [".thesis.tex.new", ".x.12a.new", ".12.new", ".x.12.newer", "x.12.new"])
def test_what_is_not_ours_stays(tmp_path, name):
    """Only names that a write makes, however old the file is."""
    path = tmp_path / name
    path.write_text("a draft")
    os.utime(path, (0, 0))
    remove_unfinished(tmp_path)
    assert path.read_text() == "a draft"


def test_only_regular_files_are_removed(tmp_path):
    """A folder with such a name, a link and its target remain; a file that can't be removed is no error."""
    folder, link, mine = tmp_path / ".plans.12.new", tmp_path / ".link.12.new", tmp_path / "mine"
    folder.mkdir()
    mine.write_text("mine")
    link.symlink_to(mine)
    os.utime(mine, (0, 0))
    remove_unfinished(tmp_path)
    assert (folder.is_dir(), link.is_symlink()) == (True, True)
    remove_unfinished(tmp_path / "nowhere")


def test_unremovable_file_ends_nothing(tmp_path, monkeypatch):
    """The disk has gone read-only."""
    path = unfinished(tmp_path, os.getpid(), old=True)

    def read_only(*_arguments, **_options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "unlink", read_only)
    remove_unfinished(tmp_path)
    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(ConfigError, match=r"can't write .*: Read-only file system"):
        write_atomic(tmp_path / "file", b"new")
    assert path.exists()


def test_file_in_place_of_a_directory(tmp_path):
    """A file where a directory belongs is told."""
    (tmp_path / "file").write_text("x")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with refused(ConfigError, "can't make the directory", hint="has this name"):
            private_directory(path)
    with pytest.raises(ConfigError, match="Not a directory"):
        write_atomic(tmp_path / "file" / "below", b"new")


@pytest.mark.parametrize(
    ("number", "kind", "status"),
    [(errno.ENOSPC, StorageError, 9), (errno.EIO, StorageError, 9), (errno.EACCES, ConfigError, 3)],
)
def test_full_disk_is_no_wrong_configuration(number, kind, status):
    """A service that ends for it is worth starting again; one that may not write there is not."""
    error = write_failed(Path("file"), OSError(number, os.strerror(number)))
    assert (type(error), error.exit_code) == (kind, status)
    assert str(error) == f"can't write file: {os.strerror(number)}"


def test_damage_is_told_with_the_files_name(tmp_path):
    damaged = pytest.raises(IntegrityError, match="file is damaged, or not what belongs there: too short")
    with damaged as caught, named(tmp_path / "file", "take another"):
        raise WireError("too short")
    assert caught.value.hint == "take another"
    with pytest.raises(UntrustedError) as other, named(tmp_path / "file", "take another"):
        raise UntrustedError("expired")
    assert str(other.value) == "expired"


def test_named_file_is_read_up_to_its_limit(tmp_path):
    (tmp_path / "f").write_bytes(b"12345")
    assert read_limited(tmp_path / "f", 5) == b"12345"
    with pytest.raises(ConfigError, match="more than 4 bytes"):
        read_limited(tmp_path / "f", 4)
    with pytest.raises(ConfigError, match="can't read"):
        read_limited(tmp_path / "gone", 5)


# -- Directory locks: other programs wait and then fail; the lock of a killed program is released --


HINT = "end the other one"
SPAWN = multiprocessing.get_context("spawn")


def hold(directory, held):
    with exclusive(directory, wait_s=0, hint=HINT):
        held.set()
        time.sleep(60)


@pytest.fixture
def holder(tmp_path):
    """Another process that has the directory; killed in the end."""
    held = SPAWN.Event()
    process = SPAWN.Process(target=hold, args=(tmp_path, held))
    process.start()
    assert held.wait(30)
    yield process
    process.kill()
    process.join()


def test_a_second_program_is_told(tmp_path, holder):
    """It waits for the first; a kill frees the directory."""
    with (
        refused(ConfigError, "in use by another program", hint_is=HINT),
        exclusive(tmp_path, wait_s=0, hint=HINT),
    ):
        raise AssertionError("both have it")
    os.kill(holder.pid, signal.SIGKILL)
    with exclusive(tmp_path, wait_s=30, hint=HINT):
        assert (tmp_path / ".lock").stat().st_mode & 0o777 == 0o600


def test_it_is_free_again_after_an_error(tmp_path):
    """A directory that is not there can't be had."""
    with pytest.raises(ZeroDivisionError), exclusive(tmp_path, wait_s=0, hint=HINT):
        raise ZeroDivisionError
    with exclusive(tmp_path, wait_s=0, hint=HINT):
        pass
    with pytest.raises(ConfigError, match="can't write"), exclusive(tmp_path / "no", wait_s=0, hint=HINT):
        pass


def test_observer_sees_somebody_at_work(tmp_path, holder):
    """Who looks sees whether somebody is at work."""
    (tmp_path / "free").mkdir()
    assert in_use(tmp_path)
    assert not in_use(tmp_path / "free")
    assert not in_use(tmp_path / "none")
    with exclusive(tmp_path / "free", wait_s=0, hint=HINT):
        assert in_use(tmp_path / "free")
    assert not in_use(tmp_path / "free")
    assert [p.name for p in (tmp_path / "free").iterdir()] == [".lock"], "looking leaves no trace of its own"
