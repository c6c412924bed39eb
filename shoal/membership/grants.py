"""Cards and grants: a party gives the owner its self-signed card, and receives a sealed grant.

A grant is sealed to one party and signed by the owner, whose fingerprint the person at the joining machine got by another
channel. A device's grant contains the secret of a key version, from which masks and content keys follow; the aggregator's
grant is another message type, with no field for it.

A device's grant is sealed to one of its receiving keys, whose number is in the envelope's head. The device erases that key
once it has stored the grant. The aggregator's grant is sealed to its seal key.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypeVar

from crypto.seal.envelope import SealError, is_from, open_from_member, read_head, seal_to_member
from crypto.seal.identity import Identity, check_seal_key, fingerprint, open_document, peek_document, sign_document
from crypto.seal.receiving import ReceivingSecrets
from shoal.errors import UntrustedError, WireError
from shoal.membership.roster import MOST_DIGITS
from shoal.protocol.channels import GRANT
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import AggregatorGrant, Card, DeviceGrant, GrantFile, ReceivingKeys, ReceivingNotice
from shoal.protocol.messages import Sealed

OWNER_NAME: Final = "owner"
DEVICE_ROLE: Final = "device"
AGGREGATOR_ROLE: Final = "aggregator"
WORKER_ROLE: Final = "worker"
KEEPER_ROLE: Final = "keeper"
"""The role on a worker's card. Its grant is that of an aggregator."""
SEAL_KEY: Final = 0
"""Stands for the recipient's seal key where the head of a grant names a receiving key."""
ERASED_HINT: Final = (
    "start the device, so that it publishes its newest receiving keys, and run `shoal-fleet publish`; or carry the card from "
    "its directory to the owner again, `shoal-fleet add-device`. A directory that was restored from a backup enrols again"
)
OTHER_VERSION_HINT: Final = "run the same version here and on the owner's machine, and have the owner make a new grant"

G = TypeVar("G", AggregatorGrant, DeviceGrant)


class ErasedKeyError(UntrustedError):
    """A grant from the owner is sealed to a receiving key that this device has erased, or never had."""


@dataclass(frozen=True, slots=True)
class GrantLabel:
    """The purpose in the head of a grant.

    Attributes:
        role: of the recipient.
        keys_since: the key version of the secrets.
        receiving: number of the receiving key that the grant is sealed to, or SEAL_KEY.
    """

    role: str
    keys_since: int
    receiving: int

    @classmethod
    def of(cls, grant: AggregatorGrant | DeviceGrant) -> GrantLabel:
        """Return the label of a grant."""
        if isinstance(grant, DeviceGrant):
            return cls(DEVICE_ROLE, grant.keys_since, grant.receiving)
        return cls(AGGREGATOR_ROLE, grant.keys_since, SEAL_KEY)

    @classmethod
    def read(cls, head: Sealed) -> GrantLabel:
        """Return the label in a head, NOT authenticated yet.

        Raises:
            WireError: it is not the head of a grant.
        """
        stem, _, rest = head.purpose.partition("/")
        role, *numbers = rest.split("/")
        digits = all(n.isascii() and n.isdigit() and len(n) <= MOST_DIGITS for n in numbers)
        if stem != GRANT.stem or len(numbers) != 2 or not digits:
            raise WireError(f"a {head.purpose} where a grant belongs")
        return cls(role, int(numbers[0]), int(numbers[1]))

    def head(self, fleet: str, recipient: str) -> Sealed:
        """Return the head of a grant with this label."""
        parts = {"role": self.role, "keys_since": self.keys_since, "receiving": self.receiving}
        return GRANT.head(fleet, OWNER_NAME, recipient, **parts)


def make_card(identity: Identity, role: str, receiving: ReceivingKeys | None = None) -> bytes:
    """Return the signed card of a party that asks to be the ``aggregator``, or a ``device`` with its receiving keys."""
    return sign_document(identity, Card(role, identity.member, receiving))


def open_card(data: bytes) -> Card:
    """Open a card after checking that its own key signed it. This proves possession of the key, not the party's identity.

    Raises:
        UntrustedError: the signature is not by the key in the card.
        WireError: the bytes are no card, its role is unknown, it has no receiving keys though it is a device's, or nothing
            can be sealed to one of its keys.
    """
    claimed = peek_document(data, Card)
    card = open_document(data, Card, claimed.member.sign_key)
    check_seal_key(card.member.seal_key)
    if card.role not in (DEVICE_ROLE, AGGREGATOR_ROLE, WORKER_ROLE, KEEPER_ROLE):
        raise WireError(f"a card for the role {card.role!r}")
    if (card.receiving is None) is (card.role == DEVICE_ROLE):
        raise WireError(
            f"a card for the role {card.role!r} {'without' if card.receiving is None else 'with'} receiving keys"
        )
    for key in card.receiving.keys if card.receiving else ():
        check_seal_key(key)
    return card


def open_notice(data: bytes | memoryview, sign_key: bytes) -> ReceivingNotice:
    """Open a notice after checking that the device with ``sign_key`` (32 bytes, Ed25519) signed it.

    Raises:
        UntrustedError: the signature is not the device's.
        WireError: the bytes are no notice, or nothing can be sealed to one of its keys.
    """
    notice = open_document(data, ReceivingNotice, sign_key)
    for key in notice.receiving.keys:
        check_seal_key(key)
    return notice


def seal_grant(owner: Identity, card: Card, grant: AggregatorGrant | DeviceGrant) -> bytes:
    """Return the grant file: ``grant`` signed by the owner and sealed to the card's holder, to the key that the grant names.

    Raises:
        WireError: the card does not hold the receiving key that a device's grant names.
    """
    label = GrantLabel.of(grant)
    sealed = seal_to_member(owner, sealing_key(card, label), label.head(grant.fleet, card.member.name), encode(grant))
    return encode(GrantFile(owner.member, sealed))


def sealing_key(card: Card, label: GrantLabel) -> bytes:
    """Return the X25519 key of the card's holder, 32 bytes, to which a grant with this label is sealed.

    Raises:
        WireError: the card does not hold it.
    """
    if label.receiving == SEAL_KEY:
        return card.member.seal_key
    if card.receiving is None:
        raise WireError("a card without receiving keys")
    return card.receiving.key(label.receiving)


def open_grant(
    identity: Identity, data: bytes, kind: type[G], owner_fingerprint: str, receiving: ReceivingSecrets | None = None
) -> G:
    """Open a grant file for ``identity`` from the owner with ``owner_fingerprint``.

    Args:
        identity: the recipient.
        data: an encoded GrantFile.
        kind: type of the grant.
        owner_fingerprint: as the owner's programs print it.
        receiving: the recipient's receiving keys, if it is a device.

    Raises:
        ErasedKeyError: the grant is sealed to a receiving key that we do not have.
        UntrustedError: the grant is another owner's or for another recipient, or was altered.
    """
    file = decode(data, GrantFile)
    if fingerprint(file.owner) != owner_fingerprint.strip().lower():
        raise UntrustedError(
            f"this grant is from owner {fingerprint(file.owner)}, not {owner_fingerprint}",
            hint="compare the fingerprint that `shoal-fleet show` prints on the owner's machine",
        )
    try:
        return _open(identity, file, kind, receiving)
    except SealError as error:
        recipient = read_head(file.sealed)[0].recipient
        raise UntrustedError(
            f"this grant is not for the keys of {identity.name!r} here",
            hint=f"it is for {recipient!r}, or for earlier keys of this party; add-device or add-aggregator makes another",
        ) from error


def peek_grant(data: bytes) -> GrantLabel:
    """Return the label of a grant file WITHOUT checking its signature.

    Raises:
        WireError: the bytes are no grant file.
    """
    return GrantLabel.read(read_head(decode(data, GrantFile).sealed)[0])


def open_renewal(
    identity: Identity, data: bytes, kind: type[G], owner_key: bytes, receiving: ReceivingSecrets | None = None
) -> G:
    """Open a later grant for ``identity`` from the pinned owner, whose Ed25519 key is ``owner_key`` (32 bytes).

    Other arguments are those of `open_grant`.

    Raises:
        ErasedKeyError: the grant is sealed to a receiving key that we do not have.
        UntrustedError: the grant is another owner's or for another recipient, or was altered.
    """
    file = decode(data, GrantFile)
    if file.owner.sign_key != owner_key:
        raise UntrustedError(f"keys from owner {fingerprint(file.owner)}, who is not this fleet's")
    return _open(identity, file, kind, receiving)


def _open(identity: Identity, file: GrantFile, kind: type[G], receiving: ReceivingSecrets | None) -> G:
    head, at = read_head(file.sealed)
    label = GrantLabel.read(head)
    role = DEVICE_ROLE if kind is DeviceGrant else AGGREGATOR_ROLE
    private = None
    if label.role == role == DEVICE_ROLE:
        private = None if receiving is None else receiving.private(label.receiving)
        if private is None:
            raise _not_held(identity, file, head, label)
    signed, _ = open_from_member(identity, file.sealed, head, at, file.owner.sign_key, private=private)
    if (head.recipient, label.role) != (identity.name, role):
        raise UntrustedError(f"this grant is for {head.recipient!r} as {label.role}")
    try:
        grant = decode(signed, kind)
    except WireError as error:
        raise WireError(f"a grant of another version of Shoal: {error}", hint=OTHER_VERSION_HINT) from error
    if GrantLabel.of(grant) != label:
        raise UntrustedError("this grant's head does not agree with its contents")
    if grant.owner_key != file.owner.sign_key:
        raise UntrustedError("this grant names another owner than the one that signed it")
    return grant


def _not_held(identity: Identity, file: GrantFile, head: Sealed, label: GrantLabel) -> UntrustedError:
    """Return the error for a grant that is not sealed to a receiving key of ours."""
    if head.recipient != identity.name or not is_from(file.sealed, head, file.owner.sign_key):
        return SealError()
    return ErasedKeyError(
        f"a grant sealed to receiving key {label.receiving} of {identity.name!r}, which is erased or not here",
        hint=ERASED_HINT,
    )
