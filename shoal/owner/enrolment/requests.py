"""Enrolment requests at the owner: open one, refuse one; `shoal.membership.enrol_requests` has the device's side."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Final

from crypto.seal.envelope import open_from_group, read_head
from crypto.seal.identity import Identity, fingerprint, sign_document
from shoal.errors import ShoalError, UntrustedError
from shoal.membership.enrol_requests import prove, token_group, token_id
from shoal.membership.grants import DEVICE_ROLE, OWNER_NAME, open_card
from shoal.protocol.channels import ENROLMENT
from shoal.protocol.codec import decode
from shoal.protocol.documents import Card, Member
from shoal.protocol.enrolment import MAX_REASON_BYTES, EnrolRefusal, EnrolRequest, EnrolStatement, Token

TOKEN_SECRET_BYTES: Final = 16


PROOF_BYTES: Final = 32


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
        plain = bytes(open_from_group(token_group(token), request.sealed, head, at, request.member.sign_key))
    except ShoalError as error:
        raise UntrustedError("the request does not prove the token that it names") from error
    proof, raw = plain[:PROOF_BYTES], plain[PROOF_BYTES:]
    # In constant time, or the duration would tell a forger how many of the first bytes are right.
    if not hmac.compare_digest(proof, prove(token, raw)):
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
