"""The owner's address at the broker, and client ids that take over no other connection."""

from pathlib import Path

import pytest

from shoal.errors import ConfigError
from shoal.owner.broker.address import (
    CA_FILE,
    SETTINGS_FILE,
    OwnerConfig,
    owner_address,
    settings_of,
)
from shoal.owner.keys.directory import FleetDirectory


def test_the_owners_settings(tmp_path, monkeypatch):
    """From the file in the owner's directory, and above it from the environment."""
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtts://broker.example")
    file = fleet.path / SETTINGS_FILE
    file.write_text('[fleet]\nca = "mine.crt"\nchunk_bytes = 60000\nwait = 2\n')
    address = owner_address(fleet)
    assert (address.ca_file, address.chunk_bytes) == (Path("mine.crt"), 60000)
    monkeypatch.setenv("SHOAL_FLEET_CA", "other.crt")
    assert owner_address(fleet).ca_file == Path("other.crt")
    assert settings_of(fleet.path) == OwnerConfig(Path("other.crt"), chunk_bytes=60000, wait=2.0)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("wait = 0", "wait is above 0"),
        ("silence = 4000", "silence is above 0"),
        ("chunk_bytes = 1", "chunk"),
        ("broker = 'x'", "unknown key 'broker'"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, line, error):
    (tmp_path / SETTINGS_FILE).write_text(f"[fleet]\n{line}\n")
    with pytest.raises(ConfigError, match=error):
        settings_of(tmp_path)


def test_without_tls_fleets_ca_is_left_out(tmp_path):
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://broker.example")
    (fleet.path / CA_FILE).write_text("a certificate")
    assert owner_address(fleet).ca_file is None
