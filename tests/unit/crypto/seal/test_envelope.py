"""Envelopes: altered, misdirected and forged ones are refused, all with the same error."""

import dataclasses
import pickle

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from crypto.seal import envelope
from crypto.seal.envelope import (
    GroupKey,
    SealError,
    open_from_group,
    open_from_member,
    read_head,
    seal_to_group,
    seal_to_member,
)
from crypto.seal.identity import Identity
from shoal.errors import UntrustedError, WireError
from shoal.protocol.messages import Sealed

ALICE, BOB, EVE = (Identity.generate(n) for n in ("alice", "bob", "eve"))
HEAD = Sealed("demo", "upload", "alice", "bob")
MESSAGE, BODY = b"what it is", b"vector" * 3
KEY = GroupKey("demo", "broadcast", b"k" * 32)
REFUSED = "a sealed message was refused"


def to_member(**changes):
    fields = {"identity": ALICE, "recipient": BOB.member.seal_key, "head": HEAD, "message": MESSAGE, "body": BODY}
    f = {**fields, **changes}
    return seal_to_member(f["identity"], f["recipient"], f["head"], f["message"], f["body"])


@pytest.fixture
def data():
    return to_member()


def open_it(data, identity=BOB, key=ALICE.member.sign_key, head=None):
    found, at = read_head(data)
    return tuple(bytes(part) for part in open_from_member(identity, data, head or found, at, key))


def open_group(data, group=KEY, key=ALICE.member.sign_key, head=None):
    found, at = read_head(data)
    return bytes(open_from_group(group, data, head or found, at, key))


def refused(action):
    """Return the SealError that ``action`` raises; a WireError from the clear head is an equal refusal."""
    with pytest.raises((SealError, WireError)) as caught:
        action()
    return caught.value


def check_alterations(data, read):
    """Check that every altered byte, cut and extension is refused, and that no refusal says which it was."""
    seen = set()
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1 << at % 8
        error = refused(lambda broken=broken: read(bytes(broken)))
        if isinstance(error, SealError):
            seen.add((type(error), str(error), error.hint))
        refused(lambda at=at: read(data[:at]))
    refused(lambda: read(data + b"\0"))
    assert seen == {(SealError, REFUSED, "")}


def test_the_member_reads_what_was_sealed(data):
    assert read_head(data)[0] == HEAD
    assert open_it(data) == (MESSAGE, BODY)
    assert open_it(memoryview(bytearray(data))) == (MESSAGE, BODY)
    assert [part for part in (MESSAGE, b"vector") if part in data] == [], "nothing of it is in the clear"
    assert to_member() != data, "two seals of the same differ"


# ---------------------------------------------------------------------------------------------------- to one member


@pytest.mark.parametrize(("message", "body"), [(b"", b""), (b"x", b""), (b"", b"y" * 100_000)])
def test_parts_may_be_empty_or_large(message, body):
    assert open_it(to_member(message=message, body=body)) == (message, body)


def test_an_altered_byte_anywhere_is_refused(data):
    """Magic, head, encapsulated key, ciphertext, tag, signature: no byte may change."""
    check_alterations(data, open_it)


CASES = {
    "another recipient": lambda: open_it(to_member(), identity=EVE),
    "another sender than expected": lambda: open_it(to_member(), key=EVE.member.sign_key),
    "signed by another": lambda: open_it(to_member(identity=EVE)),
    "a key that is no key": lambda: open_it(to_member(), key=b"\xff" * 32),
    "another purpose": lambda: open_it(to_member(), head=dataclasses.replace(HEAD, purpose="control")),
    "a group's seal": lambda: open_it(seal_to_group(ALICE, KEY, HEAD, MESSAGE)),
    "a member's seal as a group's": lambda: open_group(to_member()),
    "another group key": lambda: open_group(
        seal_to_group(ALICE, KEY, HEAD, MESSAGE), group=GroupKey("demo", "broadcast", b"K" * 32)
    ),
    "another label of the key": lambda: open_group(
        seal_to_group(ALICE, KEY, HEAD, MESSAGE), group=GroupKey("demo", "content", b"k" * 32)
    ),
    "another fleet's key": lambda: open_group(
        seal_to_group(ALICE, KEY, HEAD, MESSAGE), group=GroupKey("other", "broadcast", b"k" * 32)
    ),
    "a group message signed by another": lambda: open_group(seal_to_group(EVE, KEY, HEAD, MESSAGE)),
    "a group message for another purpose": lambda: open_group(
        seal_to_group(ALICE, KEY, HEAD, MESSAGE), head=dataclasses.replace(HEAD, purpose="roster")
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_every_refusal_is_same_to_outside(case):
    """One type, one text, no hint: a peer can't tell a bad signature from a bad tag; the cause is for the local log."""
    with pytest.raises(SealError) as caught:
        CASES[case]()
    assert (str(caught.value), caught.value.hint) == (REFUSED, "")
    assert caught.value.__cause__ is not None
    assert isinstance(caught.value, UntrustedError)


def test_ciphertext_of_another_is_not_signed(data):
    """The head that names the sender is bound into the seal, so replacing the signature does not help."""
    head, at = read_head(data)
    forged = to_member(identity=EVE, head=dataclasses.replace(HEAD, sender="eve"))
    _, at_forged = read_head(forged)
    swapped = forged[:at_forged] + data[at:-64]
    signature = EVE.sign("upload", swapped)
    with pytest.raises(SealError):
        open_it(swapped + signature, key=EVE.member.sign_key)
    assert head.sender == "alice"


def test_the_group_reads_what_was_sealed():
    data = seal_to_group(ALICE, KEY, HEAD, MESSAGE)
    assert open_group(data) == MESSAGE
    assert MESSAGE not in data


# ---------------------------------------------------------------------------------------------------- to a group


def test_altered_group_message_is_refused():
    """An altered group message is refused anywhere."""
    check_alterations(seal_to_group(ALICE, KEY, HEAD, MESSAGE), open_group)


def test_a_nonce_is_never_used_twice():
    nonces = set()
    for _ in range(200):
        data = seal_to_group(ALICE, KEY, HEAD, MESSAGE)
        nonces.add(data[read_head(data)[1] :][: envelope.NONCE_BYTES])
    assert len(nonces) == 200


def test_group_key_has_fleet_and_label():
    """Length prefixes: no two pairs of names run together to the same key."""
    ciphers = [
        GroupKey(fleet, label, b"k" * 32).aead().encrypt(bytes(12), b"x", None)
        for fleet, label in (("ab", "c"), ("a", "bc"), ("abc", ""), ("ab", "d"))
    ]
    assert len(set(ciphers)) == 4
    assert isinstance(KEY.aead(), AESGCM)


def test_labels_tell_models_apart():
    """Topic labels tell models apart and nothing else."""
    labels = {KEY.topic_label(run, model) for run in (bytes(16), b"r" * 16) for model in range(50)}
    assert len(labels) == 100
    assert all(len(label) == 16 and int(label, 16) >= 0 for label in labels)
    assert KEY.topic_label(bytes(16), 3) == KEY.topic_label(bytes(16), 3)
    assert KEY.topic_label(bytes(16), 3) != GroupKey("demo", "broadcast", b"K" * 32).topic_label(bytes(16), 3)


@pytest.mark.parametrize("length", [0, 16, 31, 33])
def test_a_group_key_has_32_bytes(length):
    with pytest.raises(WireError, match="broadcast key"):
        GroupKey("demo", "broadcast", bytes(length))


def test_a_group_key_never_shows():
    for text in (repr(KEY), str(KEY), f"{KEY}"):
        assert "kkkk" not in text
        assert "secret" in text
    with pytest.raises(TypeError, match="pickled"):
        pickle.dumps(KEY)


# ---------------------------------------------------------------------------------------------------- the clear head


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"SHE1",
        b"SHX1\x00\x00\x00\x00",
        b"SHE1\xff\xff\xff\xff" + bytes(100),
        b"SHE1\x05\x04\x00\x00" + bytes(2000),
        b"SHG1\x04\x00\x00\x00SHM1",
        b"SHG1\x09\x00\x00\x00" + bytes(20),
    ],
)
def test_a_malformed_head_is_refused(data):
    with pytest.raises(WireError):
        read_head(data)
