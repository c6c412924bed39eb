"""Enrolment requests: a new device proves a one-time token, in a message sealed under a key derived from the token.

The device knows the owner's fingerprint but not yet the owner's keys, so the request is sealed under a key of the token
itself: only holders of the enrolment line can read or make one. HMAC (RFC 2104) with SHA-256 binds the token to the device's
card, the fleet, both fingerprints and the expiry; the card's own key signs the whole.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from crypto.seal.envelope import GroupKey, open_from_group, read_head, seal_to_group
from crypto.seal.identity import Identity, fingerprint, open_document, peek_document, sign_document
from shoal.errors import ShoalError, UntrustedError, WireError
from shoal.membership.grants import DEVICE_ROLE, OWNER_NAME, make_card, open_card
from shoal.protocol.channels import ENROLMENT
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import Card, Member, ReceivingKeys
from shoal.protocol.enrolment import MAX_REASON_BYTES, EnrolRefusal, EnrolRequest, EnrolStatement, Token

TOKEN_SECRET_BYTES: Final = 16
PROOF_BYTES: Final = 32
GROUP_LABEL: Final = "enrolment"
"""Label of the group key that a token gives."""


@dataclass(frozen=True, slots=True)
class Asked:
    """An enrolment request with a valid proof.

    Attributes:
        card: the device's card; card_bytes: the same as the device signed it.
        asked_at_s: unix seconds by the device's clock.
    """

    card: Card
    card_bytes: bytes
    asked_at_s: int


def _derive(secret: bytes, purpose: str, length: int) -> bytes:
    return HKDF(hashes.SHA256(), length, None, b"shoal/v1/token/" + purpose.encode()).derive(secret)


def token_id(secret: bytes) -> str:
    """Return the 16 hex digits that name the token in topics; they reveal nothing about its secret."""
    return _derive(secret, "id", 8).hex()


def make_request(identity: Identity, token: Token, asked_at_s: int, receiving: ReceivingKeys) -> bytes:
    """Return a device's request under ``token``, an encoded `EnrolRequest`.

    Args:
        identity: the device's keys.
        token: from the enrolment line.
        asked_at_s: unix seconds.
        receiving: the device's receiving keys, for its card.
    """
    card = make_card(identity, DEVICE_ROLE, receiving)
    statement = encode(
        EnrolStatement(
            fleet=token.fleet,
            owner=token.owner,
            aggregator=token.aggregator,
            token=token_id(token.secret),
            expires_at_s=token.expires_at_s,
            asked_at_s=asked_at_s,
            card=card,
        )
    )
    head = ENROLMENT.head(token.fleet, identity.name, OWNER_NAME)
    sealed = seal_to_group(identity, _key(token), head, _prove(token, statement) + statement)
    return encode(EnrolRequest(identity.member, sealed))


def open_request(data: bytes | memoryview, token: Token) -> Asked:
    """Open a request and check that it was made with ``token`` by the holder of the keys that it names.

    The caller checks expiry and single use.

    Raises:
        UntrustedError: another token, another fleet, other fingerprints, swapped keys or altered bytes.
        WireError: the bytes are no request.
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
    # In constant time, or the duration would tell a forger how many of the first bytes are right.
    if not hmac.compare_digest(proof, _prove(token, raw)):
        raise UntrustedError("the request does not prove the token that it names")
    statement = decode(raw, EnrolStatement)
    expected = (token.fleet, token.owner, token.aggregator, token_id(token.secret), token.expires_at_s)
    found = (statement.fleet, statement.owner, statement.aggregator, statement.token, statement.expires_at_s)
    if found != expected:
        raise UntrustedError("the request is for another fleet, owner, aggregator or token than the enrolment line")
    card = open_card(statement.card)
    if card.member != request.member or card.role != DEVICE_ROLE:
        raise UntrustedError("the request's card does not belong to the keys that sign the request")
    return Asked(card, statement.card, statement.asked_at_s)


def peek_request(data: bytes | memoryview) -> EnrolRequest:
    """Decode a request WITHOUT checking it, only to name its sender in a refusal.

    Raises:
        WireError: the bytes are no request.
    """
    return decode(data, EnrolRequest)


def make_refusal(owner: Identity, fleet: str, token: str, member: Member, error: ShoalError) -> bytes:
    """Return the owner's signed refusal of the request that ``member`` made under the token with the id ``token``."""
    reason, hint = (text.encode()[:MAX_REASON_BYTES].decode(errors="ignore") for text in (str(error), error.hint))
    refusal = EnrolRefusal(
        owner=owner.member, fleet=fleet, token=token, device=fingerprint(member), reason=reason, hint=hint
    )
    return sign_document(owner, refusal)


def open_refusal(data: bytes | memoryview, token: Token, member: Member) -> EnrolRefusal:
    """Return the refusal of the request that ``member`` has made with ``token``, after checking that the owner signed it.

    Raises:
        UntrustedError: the line pins another owner, or the refusal is of another request.
        WireError: the bytes are no refusal.
    """
    claimed = peek_document(data, EnrolRefusal)
    wanted = (token.owner, token.fleet, token_id(token.secret), fingerprint(member))
    if (fingerprint(claimed.owner), claimed.fleet, claimed.token, claimed.device) != wanted:
        raise UntrustedError("a refusal of another request, or of another owner than the enrolment line names")
    return open_document(data, EnrolRefusal, claimed.owner.sign_key)


def _key(token: Token) -> GroupKey:
    return GroupKey(token.fleet, GROUP_LABEL, _derive(token.secret, "seal", 32))


def _prove(token: Token, statement: bytes) -> bytes:
    if not statement:
        raise WireError("an empty enrolment statement")
    return hmac.digest(_derive(token.secret, "proof", 32), statement, "sha256")
