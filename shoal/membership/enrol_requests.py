"""Enrolment requests: a new device proves a one-time token, in a message sealed under a key derived from the token.

The device knows the owner's fingerprint but not yet the owner's keys, so the request is sealed under a key of the token
itself: only holders of the enrolment line can read or make one. HMAC (RFC 2104) with SHA-256 binds the token to the device's
card, the fleet, both fingerprints and the expiry; the card's own key signs the whole.
"""

from __future__ import annotations

import hmac
from typing import Final

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from crypto.seal.envelope import GroupKey, seal_to_group
from crypto.seal.identity import Identity, fingerprint, open_document, peek_document
from shoal.errors import UntrustedError, WireError
from shoal.membership.grants import DEVICE_ROLE, OWNER_NAME, make_card
from shoal.protocol.channels import ENROLMENT
from shoal.protocol.codec import encode
from shoal.protocol.documents import Member, ReceivingKeys
from shoal.protocol.enrolment import EnrolRefusal, EnrolRequest, EnrolStatement, Token

GROUP_LABEL: Final = "enrolment"
"""Label of the group key that a token gives."""


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
    sealed = seal_to_group(identity, token_group(token), head, prove(token, statement) + statement)
    return encode(EnrolRequest(identity.member, sealed))


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


def token_group(token: Token) -> GroupKey:
    """Return the key under which requests with a token are sealed."""
    return GroupKey(token.fleet, GROUP_LABEL, _derive(token.secret, "seal", 32))


def prove(token: Token, statement: bytes) -> bytes:
    """Return the proof, 32 bytes, that whoever made an encoded statement holds the token."""
    if not statement:
        raise WireError("an empty enrolment statement")
    return hmac.digest(_derive(token.secret, "proof", 32), statement, "sha256")
