"""backup and restore, as the owner sees them."""

from __future__ import annotations

import pytest

from shoal.owner.keys.directory import FleetDirectory
from shoal.util.files import write_private

PASSPHRASE = "correct horse battery"


@pytest.fixture
def secret(call):
    """Variables with the passphrase in a private file."""
    write_private(call.home / "passphrase", f"{PASSPHRASE}\n".encode())
    return {"SHOAL_PASSPHRASE_FILE": str(call.home / "passphrase")}


@pytest.fixture
def backup(call, fleet, secret):
    """A backup of the fleet."""
    return call("shoal-fleet", "backup", "owner", "reef.backup", **secret)


def test_backup_is_restored_with_new_secrets(call, backup, secret):
    """No broker runs, so the owner says --offline; the secrets are new, and neither output nor argv has one."""
    assert backup.out.startswith("reef.backup: fleet reef, roster 3, ")
    assert (call.home / "reef.backup").stat().st_mode & 0o777 == 0o600
    seen = call("shoal-fleet", "restore", "x", "reef.backup", "--check", **secret)
    assert seen.out.startswith("fleet reef, roster 3, of 20")
    told = call("shoal-fleet", "restore", "again", "reef.backup", status=5, **secret)
    assert "hint: start the broker; or --offline" in told.err
    assert not (call.home / "again").exists()
    made = call("shoal-fleet", "restore", "again", "reef.backup", "--offline", **secret)
    assert made.out == "again: fleet reef, roster 1004, new secrets\n"
    assert "next: shoal-fleet show again" in made.err
    old, new = FleetDirectory(call.home / "owner"), FleetDirectory(call.home / "again")
    assert new.roster.devices == old.roster.devices
    assert new.secrets.version_secret != old.secrets.version_secret
    text = "\n".join(call.seen)
    shown = {
        piece
        for piece in (old.secrets.broadcast_key.hex(), new.secrets.version_secret.hex(), PASSPHRASE)
        if piece in text
    }
    assert shown == set()


def test_figures_as_json(call, fleet, secret):
    made = call("shoal-fleet", "backup", "owner", "b", "--json", **secret).data
    assert (made["file"], made["fleet"], made["roster"]) == ("b", "reef", 3)
    assert made["bytes"] == (call.home / "b").stat().st_size
    seen = call("shoal-fleet", "restore", "x", "b", "--check", "--json", **secret).data
    assert seen == {"fleet": "reef", "backup_roster": 3, "made_at": made["made_at"], "files": made["files"]}
    assert not (call.home / "x").exists()
    again = call("shoal-fleet", "restore", "x", "b", "--offline", "--json", **secret).data
    assert again == {**seen, "directory": "x", "roster": 1004}


def test_a_wrong_passphrase_and_a_wrong_file(call, backup, secret):
    told = call("shoal-fleet", "restore", "x", "owner/roster.signed", "--check", status=7, **secret)
    assert "no backup of a fleet" in told.err
    write_private(call.home / "passphrase", b"something else")
    told = call("shoal-fleet", "restore", "x", "reef.backup", "--check", status=6, **secret)
    assert "the passphrase is wrong" in told.err


def test_same_passphrase_for_the_copy(call, secret):
    """A fleet under a passphrase uses the same one."""
    call("shoal-fleet", "init", "owner", "--name", "reef", "--broker", "mqtt://127.0.0.1:1", "--passphrase", **secret)
    call("shoal-fleet", "backup", "owner", "b", **secret)
    call("shoal-fleet", "restore", "again", "b", "--offline", **secret)
    assert call("shoal-fleet", "show", "again", "--json", **secret).data["passphrase"] is True
