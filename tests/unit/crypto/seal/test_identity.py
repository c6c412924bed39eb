"""Identities: signatures bind content and purpose, keys live in private files and never show."""

import copy
import pickle
import stat

import pytest

from crypto.seal.identity import Identity, check_seal_key, fingerprint, verify
from shoal.errors import ConfigError, IntegrityError, UntrustedError, WireError
from shoal.protocol.documents import Member
from shoal.util.files import write_private


@pytest.fixture(scope="module")
def alice():
    return Identity.generate("alice")


def raw_keys(identity):
    return identity.sign_private.private_bytes_raw(), identity.seal_private.private_bytes_raw()


def test_signature_holds_for_its_purpose(alice):
    """A signature holds for its content and purpose."""
    signature = alice.sign("upload", b"content")
    verify(alice.member.sign_key, "upload", b"content", signature)
    verify(alice.member.sign_key, "upload", memoryview(b"content"), memoryview(signature))
    assert len(signature) == 64


@pytest.mark.parametrize(
    ("purpose", "content"), [("control", b"content"), ("upload", b"contenu"), ("uploa", b"dcontent")]
)
def test_a_signature_holds_for_nothing_else(alice, purpose, content):
    with pytest.raises(UntrustedError, match="not its sender's"):
        verify(alice.member.sign_key, purpose, content, alice.sign("upload", b"content"))


def test_altered_signatures_are_refused(alice):
    """Every altered signature and every other key is refused."""
    signature = alice.sign("upload", b"content")
    for at in range(64):
        broken = bytearray(signature)
        broken[at] ^= 1
        with pytest.raises(UntrustedError):
            verify(alice.member.sign_key, "upload", b"content", bytes(broken))
    for key in (Identity.generate("bob").member.sign_key, bytes(32), b"\xff" * 32, b"short"):
        with pytest.raises(UntrustedError):
            verify(key, "upload", b"content", signature)
    with pytest.raises(UntrustedError):
        verify(alice.member.sign_key, "upload", b"content", signature[:-1])


def test_a_saved_identity_is_the_same_one(alice, tmp_path):
    path = tmp_path / "keys" / "identity.key"
    alice.save(path)
    again = Identity.load(path)
    assert (again.member, raw_keys(again)) == (alice.member, raw_keys(alice))
    assert [stat.S_IMODE(place.stat().st_mode) for place in (path, path.parent)] == [0o600, 0o700]


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644, 0o660, 0o601])
def test_readable_key_file_is_refused(alice, tmp_path, mode):
    """A key file that others can read is refused."""
    path = tmp_path / "identity.key"
    alice.save(path)
    path.chmod(mode)
    with pytest.raises(ConfigError, match="readable by others") as caught:
        Identity.load(path)
    assert caught.value.hint.startswith("chmod 600")


def damaged(data):
    return {
        "empty": b"",
        "cut": data[:-1],
        "longer": data + b"x",
        "another magic": b"S" + data[1:],
        "a name that is not one": data.replace(b"\nalice\n", b"\nAlice\n"),
    }


@pytest.mark.parametrize("case", damaged(b""))
def test_a_damaged_key_file_is_refused(alice, tmp_path, case):
    path = tmp_path / "identity.key"
    alice.save(path)
    write_private(path, damaged(path.read_bytes())[case])
    with pytest.raises((IntegrityError, ConfigError)) as caught:
        Identity.load(path)
    for key in raw_keys(alice):
        assert key.hex() not in str(caught.value)


def test_a_missing_key_file_says_so(tmp_path):
    with pytest.raises(ConfigError, match="can't read"):
        Identity.load(tmp_path / "nowhere.key")


def test_private_keys_never_show(alice):
    for text in (repr(alice), str(alice), f"{alice!r}", repr([alice])):
        for key in raw_keys(alice):
            assert key.hex() not in text
            assert repr(key)[2:-1] not in text
        assert fingerprint(alice.member) in text


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_private_keys_can_not_be_pickled(alice, protocol):
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(alice, protocol)
    with pytest.raises(TypeError):
        copy.deepcopy(alice)


def test_fingerprint_depends_on_both_keys(alice):
    """A fingerprint is 24 characters that depend on both keys."""
    text = fingerprint(alice.member)
    assert [len(part) for part in text.split("-")] == [4] * 6
    others = [
        Member("alice", bytes(32), alice.member.seal_key),
        Member("alice", alice.member.sign_key, bytes(32)),
    ]
    assert len({text, *map(fingerprint, others)}) == 3
    assert fingerprint(Member("bob", alice.member.sign_key, alice.member.seal_key)) == text


def test_names_are_checked():
    with pytest.raises(ConfigError, match="not a valid name"):
        Identity.generate("Alice Smith")


P = 2**255 - 19
SMALL_ORDER = [
    0,
    1,
    325606250916557431795983626356110631294008115727848805560023387167927233504,
    39382357235489614581723060781553021112529911719440698176882885853963445705823,
    P - 1,
    P,
    P + 1,
]
"""The points of small order on Curve25519 and their twins that are not reduced (cr.yp.to/ecdh.html, "validate")."""


@pytest.mark.parametrize("point", SMALL_ORDER)
def test_small_order_is_no_seal_key(point):
    """A seal key of small order is no seal key."""
    with pytest.raises(WireError, match="nothing can be sealed"):
        check_seal_key(point.to_bytes(32, "little"))


def test_a_true_seal_key_is_one(alice):
    check_seal_key(alice.member.seal_key)
    check_seal_key((9).to_bytes(32, "little"))
