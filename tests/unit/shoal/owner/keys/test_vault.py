"""The owner's files: encryption under a passphrase, and changes of secrets and roster that take effect together."""

import dataclasses
import struct

import pytest

from crypto.seal import passphrase
from crypto.seal.passphrase import Lock
from shoal.errors import ConfigError, IntegrityError, UntrustedError
from shoal.owner.keys.vault import (
    BACKUP_HINT,
    CHANGE_FILE,
    OWNER_FILE,
    RENEWED_HINT,
    ROSTER_FILE,
    SECRETS_FILE,
    WRONG_LOCK_HINT,
    Change,
    FleetSecrets,
    Vault,
    is_under_passphrase,
)
from shoal.protocol.codec import decode, encode
from shoal.util.files import write_private
from tests.helpers.power_cuts import PowerCut
from tests.helpers.refusals import refused

OLD = FleetSecrets(
    "reef",
    "mqtt://h",
    broadcast_key=b"B" * 32,
    version_secret=b"V" * 32,
)
NEW = dataclasses.replace(OLD, version_secret=b"N" * 32, next_run=9)


@pytest.fixture(autouse=True)
def cheap_passphrases(monkeypatch):
    """Derive keys with little memory: a real derivation takes a tenth of a second."""
    monkeypatch.setattr(passphrase, "MEMORY_KIB", 64)
    monkeypatch.setattr(passphrase, "PASSES", 1)


def vault_in(folder, lock=None):
    """Return a vault with the old secrets and the old roster."""
    vault = Vault(folder, lock)
    vault.write(SECRETS_FILE, encode(OLD))
    write_private(folder / ROSTER_FILE, b"old roster")
    return vault


@pytest.fixture(params=[None, b"correct horse"], ids=["plain", "under a passphrase"])
def vault(tmp_path, request):
    return vault_in(tmp_path / "owner", Lock(request.param) if request.param else None)


def test_a_file_is_read_back_and_private(vault, tmp_path):
    vault.write(OWNER_FILE, b"the owner's keys")
    assert vault.read(OWNER_FILE) == b"the owner's keys"
    assert (tmp_path / "owner" / OWNER_FILE).stat().st_mode & 0o777 == 0o600


def test_passphrase_hides_all_secrets(tmp_path):
    """Under a passphrase no secret is in the files."""
    vault = vault_in(tmp_path, Lock(b"correct horse"))
    vault.change(NEW, b"new roster")
    contents = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    for secret in (b"NNNN", b"BBBB", b"VVVV"):
        assert secret not in contents
    assert vault.state() == (NEW, b"new roster")


def test_wrong_passphrase_names_the_file(tmp_path):
    """A wrong passphrase names the file and the next step."""
    vault_in(tmp_path, Lock(b"correct horse"))
    with refused(UntrustedError, f"{SECRETS_FILE}: the passphrase is wrong", hint_is=WRONG_LOCK_HINT):
        Vault(tmp_path, Lock(b"another one")).state()


def test_missing_passphrase_names_variable(tmp_path):
    """A missing passphrase names the variable to set."""
    vault_in(tmp_path, Lock(b"correct horse"))
    with refused(ConfigError, f"{SECRETS_FILE} is under a passphrase", hint="SHOAL_PASSPHRASE_FILE"):
        Vault(tmp_path, None).read(SECRETS_FILE)


def test_one_file_does_not_replace_another(tmp_path):
    """The purpose is authenticated: a copy of the owner's key is not taken for the secrets."""
    vault = vault_in(tmp_path, Lock(b"correct horse"))
    vault.write(OWNER_FILE, encode(NEW))
    write_private(tmp_path / SECRETS_FILE, (tmp_path / OWNER_FILE).read_bytes())
    with pytest.raises(UntrustedError):
        vault.state()


def test_plain_file_is_read_with_one(tmp_path):
    """The roster is never encrypted."""
    vault_in(tmp_path)
    assert Vault(tmp_path, Lock(b"correct horse")).state() == (OLD, b"old roster")


def test_owners_key_decides(tmp_path):
    """Only the owners key decides whether there is a passphrase."""
    assert not is_under_passphrase(tmp_path)
    Vault(tmp_path, None).write(OWNER_FILE, b"plain")
    assert not is_under_passphrase(tmp_path)
    Vault(tmp_path, Lock(b"correct horse")).write(OWNER_FILE, b"plain")
    assert is_under_passphrase(tmp_path)


def test_change_is_in_force_at_once(vault, tmp_path):
    """A change is in force at once and its journal remains until the end."""
    assert not vault.is_changing
    vault.change(NEW, b"new roster")
    assert vault.is_changing
    assert vault.state() == (NEW, b"new roster")
    vault.end_change()
    assert not vault.is_changing
    assert not (tmp_path / "owner" / CHANGE_FILE).exists()
    assert vault.state() == (NEW, b"new roster")


@pytest.mark.parametrize("written", [1, 2, 3])
def test_change_is_whole_at_any_interruption(vault, tmp_path, monkeypatch, written):
    """After the journal, after the secrets, after the roster; carrying it out again is harmless."""
    count = [0]

    def write(path, data):
        if count[0] == written:
            raise PowerCut
        count[0] += 1
        write_private(path, data)

    with monkeypatch.context() as patched:
        patched.setattr("shoal.owner.keys.vault.write_private", write)
        if written < 3:
            with pytest.raises(PowerCut):
                vault.change(NEW, b"new roster")
        else:
            vault.change(NEW, b"new roster")
    assert vault.state() == (NEW, b"new roster")
    assert vault.carry_out()
    assert vault.carry_out()
    vault.end_change()
    assert vault.state() == (NEW, b"new roster")
    assert (tmp_path / "owner" / ROSTER_FILE).read_bytes() == b"new roster"


def test_change_without_journal_is_void(vault, monkeypatch):
    """A change that does not reach the journal leaves everything as it was."""

    def write(_path, _data):
        raise PowerCut

    with monkeypatch.context() as patched:
        patched.setattr("shoal.owner.keys.vault.write_private", write)
        with pytest.raises(PowerCut):
            vault.change(NEW, b"new roster")
    assert not vault.is_changing
    assert vault.state() == (OLD, b"old roster")


def test_without_a_journal_nothing_to_do(vault):
    """Without a journal there is nothing to carry out."""
    assert not vault.carry_out()
    vault.end_change()
    assert vault.state() == (OLD, b"old roster")


def test_secrets_and_roster_match(vault, tmp_path, monkeypatch):
    """The other program replaces both between our two reads."""
    other = Vault(tmp_path / "owner", vault._lock)
    real, calls = Vault.read, []

    def read(self, file):
        if not calls:
            calls.append(file)
            other.change(NEW, b"new roster")
            other.end_change()
        return real(self, file)

    monkeypatch.setattr(Vault, "read", read)
    assert vault.state() == (NEW, b"new roster")


@pytest.mark.parametrize("junk", [b"", b"junk", encode(OLD)])
def test_a_damaged_journal_is_named(tmp_path, junk):
    vault = vault_in(tmp_path)
    write_private(tmp_path / CHANGE_FILE, junk)
    for use in (vault.state, vault.carry_out):
        with refused(IntegrityError, f"{CHANGE_FILE} is damaged", hint_is=BACKUP_HINT):
            use()


def test_damaged_secrets_are_named(tmp_path):
    vault = vault_in(tmp_path)
    write_private(tmp_path / SECRETS_FILE, encode(OLD)[:-1])
    with refused(IntegrityError, f"{SECRETS_FILE} is damaged", hint_is=RENEWED_HINT):
        vault.state()


def earlier_format():
    """Return the secrets as earlier versions wrote them: kind 96, with a mask secret, a content key and mask epochs."""
    texts = [struct.pack("<H", len(text)) + text.encode() for text in (OLD.fleet, OLD.broker)]
    blobs = [struct.pack("<I", 32) + bytes([name]) * 32 for name in b"MCBV"]
    return b"".join((b"SHM1", bytes([96]), *texts, *blobs, struct.pack("<IIII?", 0, 1, 1, 0, True)))


@pytest.mark.parametrize("kind", [96, encode(OLD)[4]], ids=["as it was", "with today's kind"])
def test_earlier_secrets_are_refused(tmp_path, kind):
    """The fields alone tell them apart as well."""
    vault = vault_in(tmp_path)
    before = earlier_format()
    write_private(tmp_path / SECRETS_FILE, before[:4] + bytes([kind]) + before[5:])
    with refused(
        IntegrityError, "or an earlier version of Shoal made this fleet", hint="make a new fleet in another directory"
    ):
        vault.state()


def test_unreadable_journal_is_an_error(tmp_path):
    """To go on with the old secrets would undo a revocation."""
    vault = vault_in(tmp_path)
    vault.change(NEW, b"new roster")
    (tmp_path / CHANGE_FILE).chmod(0o644)
    with pytest.raises(ConfigError, match=CHANGE_FILE):
        vault.state()


def test_fresh_secrets_are_never_shown():
    """Fresh secrets are drawn and never shown."""
    one, other = (FleetSecrets.fresh("reef", "mqtt://user:word@h") for _ in range(2))
    drawn = {s for f in (one, other) for s in (f.broadcast_key, f.version_secret)}
    assert len(drawn) == 4
    assert {len(s) for s in drawn} == {32}
    assert one.next_run == 1
    for shown in (repr(OLD), repr(Change(encode(OLD), b"r")), repr(one)):
        assert "BBBB" not in shown
        assert "VVVV" not in shown
        assert "word" not in shown
    assert decode(encode(one), FleetSecrets) == one
