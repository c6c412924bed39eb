"""The commands refuse a wrong target before they ask for a passphrase; transcripts are in tests/cli/test_backups.py."""

import pytest
import typer

from shoal.errors import ConfigError
from shoal.owner.cli import main, upkeep
from shoal.owner.keys.directory import FleetDirectory


@pytest.fixture
def fleet(tmp_path, monkeypatch):
    monkeypatch.setattr(upkeep, "ask", lambda *_, **__: pytest.fail("asked for a passphrase"))
    return FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://127.0.0.1:1")


def test_existing_file_is_refused_first(fleet, tmp_path):
    """A file that exists is refused before a passphrase is asked for."""
    (tmp_path / "b").write_bytes(b"an earlier backup")
    with pytest.raises(ConfigError, match="exists already"):
        upkeep.backup(fleet.path, tmp_path / "b")


def test_so_is_a_link_that_leads_nowhere(fleet, tmp_path):
    (tmp_path / "b").symlink_to(tmp_path / "gone")
    with pytest.raises(ConfigError, match="exists already"):
        upkeep.backup(fleet.path, tmp_path / "b")


def test_file_inside_directory_is_refused(fleet):
    with pytest.raises(ConfigError, match="backup of"):
        upkeep.backup(fleet.path, fleet.path / "runs" / "b")


def test_large_file_is_refused_unread(tmp_path, monkeypatch):
    """A file that is too large is refused before it is read whole."""
    monkeypatch.setattr("shoal.membership.backup.MAX_FILE_BYTES", 10)
    (tmp_path / "b").write_bytes(bytes(11))
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        upkeep.restore(tmp_path / "new", tmp_path / "b")


def test_the_commands_are_registered():
    assert set(typer.main.get_command(main.app).commands) >= {"backup", "restore", "doctor"}
