"""Cards and grants: a party gives the owner its self-signed card, and receives a sealed grant.

A grant is sealed to one party and signed by the owner, whose fingerprint the person at the joining machine got by another
channel. A device's grant contains the mask secret and the content key; the aggregator's grant is another message type, with
no field for them.
"""

from __future__ import annotations

from typing import Final, TypeVar

from crypto.seal.envelope import SealError, open_from_member, read_head, seal_to_member
from crypto.seal.identity import Identity, check_seal_key, fingerprint
from crypto.seal.signed import open_document, peek_document, sign_document
from shoal.errors import UntrustedError, WireError
from shoal.protocol.channels import GRANT
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import AggregatorGrant, Card, DeviceGrant, GrantFile

OWNER_NAME: Final = "owner"
DEVICE_ROLE: Final = "device"
AGGREGATOR_ROLE: Final = "aggregator"

G = TypeVar("G", AggregatorGrant, DeviceGrant)


def make_card(identity: Identity, role: str) -> bytes:
    """Return the signed card of a party that asks to be a ``device`` or the ``aggregator``."""
    return sign_document(identity, Card(role, identity.member))


def open_card(data: bytes) -> Card:
    """Open a card after checking that its own key signed it. This proves possession of the key, not the party's identity.

    Raises:
        UntrustedError: the signature is not by the key in the card.
        WireError: the bytes are no card, its role is unknown, or nothing can be sealed to its key.
    """
    claimed = peek_document(data, Card)
    card = open_document(data, Card, claimed.member.sign_key)
    check_seal_key(card.member.seal_key)
    if card.role not in (DEVICE_ROLE, AGGREGATOR_ROLE):
        raise WireError(f"a card for the role {card.role!r}")
    return card


def seal_grant(owner: Identity, card: Card, grant: AggregatorGrant | DeviceGrant) -> bytes:
    """Return the grant file: ``grant`` signed by the owner and sealed to the card's holder."""
    head = GRANT.head(grant.fleet, OWNER_NAME, card.member.name, role=card.role)
    sealed = seal_to_member(owner, card.member.seal_key, head, encode(grant))
    return encode(GrantFile(owner.member, sealed))


def open_grant(identity: Identity, data: bytes, kind: type[G], owner_fingerprint: str) -> G:
    """Open a grant file for ``identity`` from the owner with ``owner_fingerprint``.

    Raises:
        UntrustedError: the grant is another owner's or for another recipient, or was altered.
    """
    file = decode(data, GrantFile)
    if fingerprint(file.owner) != owner_fingerprint.strip().lower():
        raise UntrustedError(
            f"this grant is from owner {fingerprint(file.owner)}, not {owner_fingerprint}",
            hint="compare the fingerprint that `shoal-fleet show` prints on the owner's machine",
        )
    try:
        return _open(identity, file, kind)
    except SealError as error:
        recipient = read_head(file.sealed)[0].recipient
        raise UntrustedError(
            f"this grant is not for the keys of {identity.name!r} here",
            hint=f"it is for {recipient!r}, or for earlier keys of this party; add-device or add-aggregator makes another",
        ) from error


def open_renewal(identity: Identity, data: bytes, kind: type[G], owner_key: bytes) -> G:
    """Open a later grant for ``identity`` from the pinned owner, whose Ed25519 key is ``owner_key`` (32 bytes).

    Raises:
        UntrustedError: the grant is another owner's or for another recipient, or was altered.
    """
    file = decode(data, GrantFile)
    if file.owner.sign_key != owner_key:
        raise UntrustedError(f"keys from owner {fingerprint(file.owner)}, who is not this fleet's")
    return _open(identity, file, kind)


def _open(identity: Identity, file: GrantFile, kind: type[G]) -> G:
    head, at = read_head(file.sealed)
    signed, _ = open_from_member(identity, file.sealed, head, at, file.owner.sign_key)
    role = DEVICE_ROLE if kind is DeviceGrant else AGGREGATOR_ROLE
    if (head.recipient, head.purpose) != (identity.name, GRANT.purpose.format(role=role)):
        raise UntrustedError(f"this grant is for {head.recipient!r} as {head.purpose.removeprefix(f'{GRANT.stem}/')}")
    grant = decode(signed, kind)
    if grant.owner_key != file.owner.sign_key:
        raise UntrustedError("this grant names another owner than the one that signed it")
    return grant
