"""Joining a fleet: a party's self-signed card goes to the owner, the owner's sealed grant comes back.

A grant is sealed to one party and signed by the owner, whose fingerprint the person who joins has got by another way.
Devices get the mask secret and the content key; the aggregator's grant is another message that has no field for them.
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
    """Return the card of a party that wants to be a ``device`` or the ``aggregator``."""
    return sign_document(identity, Card(role, identity.member))


def open_card(data: bytes) -> Card:
    """Return a card whose own key signed it: it proves that the sender holds the key, not who the sender is.

    Raises:
        UntrustedError: the signature is not of the key in the card.
        WireError: not a card, or one with a key that nothing can be sealed to.
    """
    claimed = peek_document(data, Card)
    card = open_document(data, Card, claimed.member.sign_key)
    check_seal_key(card.member.seal_key)
    if card.role not in (DEVICE_ROLE, AGGREGATOR_ROLE):
        raise WireError(f"a card for the role {card.role!r}")
    return card


def seal_grant(owner: Identity, card: Card, grant: AggregatorGrant | DeviceGrant) -> bytes:
    """Return the file that only the card's holder can open."""
    head = GRANT.head(grant.fleet, OWNER_NAME, card.member.name, role=card.role)
    sealed = seal_to_member(owner, card.member.seal_key, head, encode(grant))
    return encode(GrantFile(owner.member, sealed))


def open_grant(identity: Identity, data: bytes, kind: type[G], owner_fingerprint: str) -> G:
    """Return the grant, if the owner of ``owner_fingerprint`` made it for ``identity``.

    Raises:
        UntrustedError: another owner, another recipient, or altered.
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
            hint=f"it is for {recipient!r}, or for keys made before these; add-device or add-aggregator makes another",
        ) from error


def open_renewal(identity: Identity, data: bytes, kind: type[G], owner_key: bytes) -> G:
    """Return a later grant, if the owner whose Ed25519 key (32 bytes) is pinned made it for ``identity``.

    Raises:
        UntrustedError: another owner, another recipient, or altered.
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
