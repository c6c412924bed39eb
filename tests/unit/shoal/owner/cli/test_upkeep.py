"""The commands refuse a wrong target before they ask for a passphrase; transcripts are in tests/cli/test_backups.py."""

import pytest

from shoal.errors import ConfigError
from shoal.owner.cli import upkeep


def test_large_file_is_refused_unread(tmp_path, monkeypatch):
    """A file that is too large is refused before it is read whole."""
    monkeypatch.setattr("shoal.membership.backup.MAX_FILE_BYTES", 10)
    (tmp_path / "b").write_bytes(bytes(11))
    with pytest.raises(ConfigError, match="more than 10 bytes"):
        upkeep.restore(tmp_path / "new", tmp_path / "b")
