"""Proof of a one-time token: a new device's request, sealed and authenticated under a secret that the owner handed out.

The device knows the owner's fingerprint but not yet the owner's keys, so the request is sealed under a key of the token
itself: whoever has not seen the line can neither read nor make one. HMAC (RFC 2104) with SHA-256 binds the token to the
device's card, the fleet, both fingerprints and the expiry; the card's own key signs the whole.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from crypto.seal.envelope import GroupKey, open_from_group, read_head, seal_to_group
from crypto.seal.identity import Identity
from shoal.errors import ShoalError, UntrustedError, WireError
from shoal.membership.grants import DEVICE_ROLE, OWNER_NAME, make_card, open_card
from shoal.protocol.channels import ENROLMENT
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import Card
from shoal.protocol.enrolment import EnrolRequest, EnrolStatement, Token

TOKEN_SECRET_BYTES: Final = 16
PROOF_BYTES: Final = 32
GROUP_LABEL: Final = "enrolment"
"""Label of the group key that a token gives."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An enrolment request whose token holds.

    Attributes:
        card: the device's; card_bytes: the same as it signed it.
        asked_at_s: unix seconds by the device's clock.
    """

    card: Card
    card_bytes: bytes
    asked_at_s: int


def _derive(secret: bytes, purpose: str, length: int) -> bytes:
    return HKDF(hashes.SHA256(), length, None, b"shoal/v1/token/" + purpose.encode()).derive(secret)


def token_id(secret: bytes) -> str:
    """Return the 16 hex digits by which topics name the token; they say nothing about its secret."""
    return _derive(secret, "id", 8).hex()


def make_request(identity: Identity, token: Token, asked_at_s: int) -> bytes:
    """Return the request of a device that was given ``token``: an encoded `EnrolRequest`."""
    card = make_card(identity, DEVICE_ROLE)
    statement = encode(
        EnrolStatement(
            token.fleet,
            token.owner,
            token.aggregator,
            token_id(token.secret),
            token.expires_at_s,
            asked_at_s,
            card,
        )
    )
    head = ENROLMENT.head(token.fleet, identity.name, OWNER_NAME)
    sealed = seal_to_group(identity, _key(token), head, _prove(token, statement) + statement)
    return encode(EnrolRequest(identity.member, sealed))


def open_request(data: bytes | memoryview, token: Token) -> Asked:
    """Return who asks, if the request was made with ``token`` by the holder of the keys that it names.

    Expiry and single use are the caller's to check.

    Raises:
        UntrustedError: another token, another fleet, other fingerprints, swapped keys or altered bytes.
        WireError: not a request.
    """
    request = decode(data, EnrolRequest)
    head, at = read_head(request.sealed)
    if head != ENROLMENT.head(token.fleet, request.member.name, OWNER_NAME):
        raise UntrustedError(f"a request of {head.sender!r} to {head.recipient!r} of fleet {head.fleet!r}")
    try:
        plain = bytes(open_from_group(_key(token), request.sealed, head, at, request.member.sign_key))
    except ShoalError as error:
        raise UntrustedError("the request does not prove the token that it names") from error
    proof, raw = plain[:PROOF_BYTES], plain[PROOF_BYTES:]
    if not hmac.compare_digest(proof, _prove(token, raw)):
        raise UntrustedError("the request does not prove the token that it names")
    statement = decode(raw, EnrolStatement)
    expected = (token.fleet, token.owner, token.aggregator, token_id(token.secret), token.expires_at_s)
    found = (statement.fleet, statement.owner, statement.aggregator, statement.token, statement.expires_at_s)
    if found != expected:
        raise UntrustedError("the request is for another fleet, owner, aggregator or token than the line says")
    card = open_card(statement.card)
    if card.member != request.member or card.role != DEVICE_ROLE:
        raise UntrustedError("the request's card is not of the keys that sign it")
    return Asked(card, statement.card, statement.asked_at_s)


def peek_request(data: bytes | memoryview) -> EnrolRequest:
    """Return the request WITHOUT checking anything about it: only to say whose request is refused.

    Raises:
        WireError: not a request.
    """
    return decode(data, EnrolRequest)


def _key(token: Token) -> GroupKey:
    return GroupKey(token.fleet, GROUP_LABEL, _derive(token.secret, "seal", 32))


def _prove(token: Token, statement: bytes) -> bytes:
    if not statement:
        raise WireError("an empty enrolment statement")
    return hmac.digest(_derive(token.secret, "proof", 32), statement, "sha256")
