"""The files of a backup: none is written outside of its directory, no link is followed, and a file that vanishes is left out."""

import pytest

from shoal.errors import ConfigError, IntegrityError
from shoal.membership import backup as backups
from shoal.membership.backup import Backup, BackupFile, files_of, write_files


@pytest.mark.parametrize("name", ["../owner.key", "/etc/passwd", "", "runs/../../x", "."])
def test_escaping_name_is_refused(tmp_path, name):
    """A name that leads out of the directory is refused."""
    hostile = Backup(1, "reef", 1, 0, (BackupFile(name, b"x"),))
    with pytest.raises(IntegrityError, match="outside"):
        write_files(hostile, tmp_path / "in" / "here")
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_files_are_read_pattern_by_pattern(tmp_path):
    for name in ("b.key", "a.key", "c", ".d.00aa.7.new", "folder"):
        (tmp_path / name).mkdir() if name == "folder" else (tmp_path / name).write_bytes(name.encode())
    assert [file.name for file in files_of(tmp_path, "c", "*.key", "gone", "fold*")] == ["c", "a.key", "b.key"]


def test_vanished_file_is_left_out(tmp_path, monkeypatch):
    """A file that goes meanwhile is left out; a link is not followed."""
    for name in "ab":
        (tmp_path / name).write_bytes(b"x")
    read = backups._read

    def removing(path, most):
        (tmp_path / "b").unlink(missing_ok=True)
        return read(path, most)

    monkeypatch.setattr(backups, "_read", removing)
    assert [file.name for file in files_of(tmp_path, "*")] == ["a"]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "link").symlink_to(tmp_path / "a")
    with pytest.raises(ConfigError, match="link"):
        list(files_of(tmp_path / "in", "*"))
