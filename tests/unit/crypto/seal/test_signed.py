"""Documents that are signed in clear: whose they are, of which type, and of which version."""

import dataclasses

import pytest

from crypto.seal.identity import SIGNATURE_BYTES, Identity, open_document, peek_document, sign_document
from shoal.errors import UntrustedError, WireError
from shoal.protocol.codec import encode
from shoal.protocol.documents import Card, Roster
from shoal.protocol.recipe import Setting

OWNER, OTHER = Identity.generate("owner"), Identity.generate("owner")
KEY = OWNER.member.sign_key
CARD = Card("device", OWNER.member)
SIGNED = sign_document(OWNER, CARD)


def test_document_is_signature_then_bytes():
    """A document is its signature followed by its bytes."""
    assert SIGNED[SIGNATURE_BYTES:] == encode(CARD)
    assert open_document(SIGNED, Card, KEY) == CARD
    assert open_document(memoryview(SIGNED), Card, KEY) == CARD


@pytest.mark.parametrize(
    "altered",
    [
        *(
            SIGNED[:at] + bytes([SIGNED[at] ^ 1]) + SIGNED[at + 1 :]
            for at in (0, SIGNATURE_BYTES - 1, SIGNATURE_BYTES, -2)
        ),
        SIGNED[:-1],
        SIGNED + b"\0",
        sign_document(OTHER, CARD),
    ],
    ids=["first bit", "last of the signature", "first of the bytes", "near the end", "cut", "longer", "another signer"],
)
def test_altered_document_is_refused(altered):
    with pytest.raises(UntrustedError):
        open_document(altered, Card, KEY)


def test_signature_holds_for_one_type():
    """Both types may have the same bytes: the signature covers the type's name as well."""
    content = encode(Setting("a", "b"))
    signed = OWNER.sign("document/Roster", content) + content
    with pytest.raises(UntrustedError):
        open_document(signed, Setting, KEY)
    with pytest.raises(UntrustedError):
        open_document(SIGNED, Roster, KEY)


@pytest.mark.parametrize("size", [0, 1, SIGNATURE_BYTES])
def test_bytes_of_bare_signature_are_too_few(size):
    """Bytes that hold no more than a signature are too short."""
    with pytest.raises(WireError, match=f"^{size} bytes are too short for a signed Card$"):
        open_document(SIGNED[:size], Card, KEY)


def test_other_version_is_no_forgery():
    """Its signature is valid, and its bytes are not a document of this version."""
    content = encode(CARD) + b"one more field"
    signed = OWNER.sign("document/Card", content) + content
    with pytest.raises(WireError, match=r"^this Card was signed by another version of Shoal \(") as caught:
        open_document(signed, Card, KEY)
    assert not isinstance(caught.value, UntrustedError)
    assert "upgrade the older software" in caught.value.hint


def test_peek_checks_no_signature_but_form():
    stranger = dataclasses.replace(CARD, role="aggregator")
    assert peek_document(bytes(SIGNATURE_BYTES) + encode(stranger), Card) == stranger
    with pytest.raises(WireError):
        peek_document(bytes(SIGNATURE_BYTES) + b"junk", Card)
