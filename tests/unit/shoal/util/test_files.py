"""Files that survive: old bytes or new ones, private from the first moment, and no litter."""

import errno
import os
import stat
from pathlib import Path

import pytest

from shoal.errors import ConfigError, IntegrityError, StorageError, UntrustedError, WireError
from shoal.util.files import (
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
    path = tmp_path / "file"
    for data in (b"first", b"", b"x" * 100_000, memoryview(b"last")):
        write_atomic(path, data, durable=durable)
        assert path.read_bytes() == bytes(data)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    """If the disk fills up half-way, the old file is unchanged and no temporary file remains."""
    path = tmp_path / "file"
    write_atomic(path, b"old")

    def full(_handle, _data):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        patch.setattr(os, "writev", full)
        with pytest.raises(ConfigError, match="No space left on device") as caught:
            write_atomic(path, b"new and longer")
    assert str(caught.value) == f"can't write {path}: No space left on device"
    assert "the space left" in caught.value.hint
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert path.read_bytes() == b"old"
    write_atomic(path, b"new")
    assert path.read_bytes() == b"new"


def test_failed_rename_leaves_no_file(tmp_path):
    """The target is a directory, so the rename fails."""
    (tmp_path / "file" / "inner").mkdir(parents=True)
    with pytest.raises(ConfigError, match="can't write"):
        write_atomic(tmp_path / "file", b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file" / "inner").is_dir()


def test_pieces_are_one_file(tmp_path):
    """Pieces are written in order as one file."""
    write_atomic(tmp_path / "file", b"head", memoryview(b"body"), b"", b"tail", durable=False)
    assert (tmp_path / "file").read_bytes() == b"headbodytail"


def test_short_writes_are_continued(tmp_path, monkeypatch):
    """The kernel may take less than it is given."""
    real = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: real(handle, bytes(data[:7])))
    data = bytes(range(256))
    write_atomic(tmp_path / "file", data)
    assert (tmp_path / "file").read_bytes() == data


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o077])
def test_files_are_private_whatever_umask(tmp_path, umask):
    before = os.umask(umask)
    try:
        write_private(tmp_path / "keys" / "secret", b"s")
        write_atomic(tmp_path / "keys" / "plain", b"p")
        private_directory(tmp_path / "deep" / "er")
    finally:
        os.umask(before)
    assert mode(tmp_path / "keys") == mode(tmp_path / "deep" / "er") == 0o700
    assert mode(tmp_path / "keys" / "secret") == mode(tmp_path / "keys" / "plain") == 0o600


def test_a_secret_comes_back(tmp_path):
    write_private(tmp_path / "secret", b"s\0s")
    assert read_private(tmp_path / "secret") == b"s\0s"


@pytest.mark.parametrize("wide", [0o610, 0o604, 0o644, 0o666, 0o620, 0o602, 0o601])
def test_reachable_secret_is_refused(tmp_path, wide):
    """A secret that others can reach is refused."""
    path = tmp_path / "secret"
    write_private(path, b"secret bytes")
    path.chmod(wide)
    with pytest.raises(ConfigError) as caught:
        read_private(path)
    assert f"{wide:04o}" in str(caught.value)
    assert caught.value.hint == f"chmod 600 {path}"
    assert "secret bytes" not in str(caught.value)


def test_a_missing_secret_says_what_is_wrong(tmp_path):
    with refused(ConfigError, "No such file", hint="check that it exists"):
        read_private(tmp_path / "nowhere")


def test_existing_directory_stays_as_it_is(tmp_path):
    """Its owner may have chosen the mode on purpose; the files in it are private by themselves."""
    tmp_path.chmod(0o755)
    assert private_directory(tmp_path) == tmp_path
    assert mode(tmp_path) == 0o755
    sync_directory(tmp_path)


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
    assert folder.is_dir()
    assert link.is_symlink()
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
