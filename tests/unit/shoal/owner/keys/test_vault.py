"""The owner's files: encryption under a passphrase, and changes of secrets and roster that take effect together."""

import dataclasses
import struct
from contextlib import nullcontext

import pytest

from crypto.seal import passphrase
from crypto.seal.passphrase import Lock
from shoal.errors import ConfigError, IntegrityError, UntrustedError, WireError
from shoal.owner.keys.vault import (
    BACKUP_HINT,
    CHANGE_FILE,
    MOST_VERSIONS,
    OWNER_FILE,
    RENEWED_HINT,
    ROSTER_FILE,
    RUNS,
    SECRETS_FILE,
    WRONG_LOCK_HINT,
    Change,
    FleetSecrets,
    StoredVersions,
    Vault,
    VersionSecrets,
    highest_run,
    is_under_passphrase,
    run_file,
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


def test_passphrase_hides_all_secrets(tmp_path):
    """Files are private, and under a passphrase no secret is in them; one file does not replace another."""
    vault = vault_in(tmp_path, Lock(b"correct horse"))
    vault.change(NEW, b"new roster")
    contents = b"".join(p.read_bytes() for p in tmp_path.iterdir())
    assert [secret for secret in (b"NNNN", b"BBBB", b"VVVV") if secret in contents] == []
    assert vault.state() == (NEW, b"new roster")
    vault.end_change()
    vault.write(OWNER_FILE, encode(NEW))
    assert vault.read(OWNER_FILE) == encode(NEW)
    assert (tmp_path / OWNER_FILE).stat().st_mode & 0o777 == 0o600
    write_private(tmp_path / SECRETS_FILE, (tmp_path / OWNER_FILE).read_bytes())
    with pytest.raises(UntrustedError):
        vault.state()


def test_wrong_passphrase_names_the_file(tmp_path):
    """And the next step; a missing one names the variable to set."""
    vault_in(tmp_path, Lock(b"correct horse"))
    with refused(UntrustedError, f"{SECRETS_FILE}: the passphrase is wrong", hint_is=WRONG_LOCK_HINT):
        Vault(tmp_path, Lock(b"another one")).state()
    with refused(ConfigError, f"{SECRETS_FILE} is under a passphrase", hint="SHOAL_PASSPHRASE_FILE"):
        Vault(tmp_path, None).read(SECRETS_FILE)


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
    """Its journal remains until the end; without one there is nothing to carry out."""
    assert not vault.carry_out()
    vault.end_change()
    assert not vault.is_changing
    assert vault.state() == (OLD, b"old roster")
    vault.change(NEW, b"new roster")
    assert vault.is_changing
    assert vault.state() == (NEW, b"new roster")
    vault.end_change()
    assert not vault.is_changing
    assert not (tmp_path / "owner" / CHANGE_FILE).exists()
    assert vault.state() == (NEW, b"new roster")


@pytest.mark.parametrize("written", [0, 1, 2, 3])
def test_change_is_whole_at_any_interruption(vault, tmp_path, monkeypatch, written):
    """After the journal, after the secrets, after the roster, or void before; carrying it out again is harmless."""
    count = [0]

    def write(path, data):
        if count[0] == written:
            raise PowerCut
        count[0] += 1
        write_private(path, data)

    with monkeypatch.context() as patched:
        patched.setattr("shoal.owner.keys.vault.write_private", write)
        with pytest.raises(PowerCut) if written < 3 else nullcontext():
            vault.change(NEW, b"new roster")
    after = (NEW, b"new roster") if written else (OLD, b"old roster")
    assert vault.state() == after
    assert [vault.carry_out() for _ in range(2)] == [written > 0] * 2
    vault.end_change()
    assert vault.state() == after
    assert (tmp_path / "owner" / ROSTER_FILE).read_bytes() == after[1]


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


def earlier_format():
    """Return the secrets as earlier versions wrote them: kind 96, with a mask secret, a content key and mask epochs."""
    texts = [struct.pack("<H", len(text)) + text.encode() for text in (OLD.fleet, OLD.broker)]
    blobs = [struct.pack("<I", 32) + bytes([name]) * 32 for name in b"MCBV"]
    return b"".join((b"SHM1", bytes([96]), *texts, *blobs, struct.pack("<IIII?", 0, 1, 1, 0, True)))


EARLIER = earlier_format()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (encode(OLD)[:-1], f"{SECRETS_FILE} is damaged"),
        (EARLIER, "or an earlier version of Shoal made this fleet"),
        (EARLIER[:4] + encode(OLD)[4:5] + EARLIER[5:], "or an earlier version of Shoal made this fleet"),
    ],
    ids=["damaged", "earlier", "earlier with today's kind"],
)
def test_other_secrets_are_refused(tmp_path, data, what):
    """The fields alone tell those of earlier versions apart as well."""
    vault = vault_in(tmp_path)
    write_private(tmp_path / SECRETS_FILE, data)
    with refused(IntegrityError, what, hint_is=RENEWED_HINT) as caught:
        vault.state()
    assert "make a new fleet in another directory" in caught.value.hint


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


# -- The stored secrets of earlier key versions --


def secrets(number, byte=b"s"):
    return VersionSecrets(number, byte * 32, b"b" * 32)


def numbers(versions):
    return [v.number for v in versions.versions]


def test_versions_are_in_order():
    """Each is there once; the oldest is removed beyond the limit. Damaged bytes are refused and secrets are not shown."""
    found = StoredVersions().adding(secrets(7)).adding(secrets(3)).adding(secrets(7, b"t"))
    assert numbers(found) == [3, 7]
    assert found.versions[1].version_secret == b"t" * 32
    assert decode(encode(found), StoredVersions) == found
    with pytest.raises(WireError):
        decode(encode(found)[:-1], StoredVersions)
    assert "sss" not in repr(found)
    for number in range(8, MOST_VERSIONS + 8):
        found = found.adding(secrets(number))
    assert numbers(found) == list(range(8, MOST_VERSIONS + 8))
    assert numbers(found.since(MOST_VERSIONS + 6)) == [MOST_VERSIONS + 6, MOST_VERSIONS + 7]
    assert numbers(found.since(MOST_VERSIONS + 8)) == []


# -- Names and numbers of run files --


def test_highest_run_is_that_of_a_file(tmp_path):
    """The highest run is the highest number of a run file."""
    assert highest_run(tmp_path) == 0
    (tmp_path / RUNS).mkdir()
    for run in (2, 11):
        run_file(tmp_path, run).touch()
    for name in ("000099.run.tmp", "12.run", "000100.txt"):
        (tmp_path / RUNS / name).touch()
    assert highest_run(tmp_path) == 11
