"""A device's place in a fleet: its own keys, the mask secret and the content key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from crypto.seal.envelope import GroupKey, SealError, open_from_group, read_head
from crypto.seal.grants import DEVICE_ROLE
from crypto.seal.membership import Membership, accept_grant, make_identity
from crypto.seal.roster import aggregator_of
from crypto.seal.signed import open_document
from wire.codec import decode
from wire.documents import DeviceGrant, RunPackage, RunPlan
from wire.errors import UntrustedError

if TYPE_CHECKING:
    from crypto.mask.secret import MaskSecret


class DeviceMembership(Membership[DeviceGrant]):
    """A device that belongs to a fleet.

    Attributes:
        index: its place in the roster, by which announcements address it.
    """

    def __init__(self, directory: Path) -> None:
        """Load what `join` left in ``directory``.

        Raises:
            NotEnrolledError: nobody has joined there.
            UntrustedError: the roster is not the owner's, expired, or does not list this device.
        """
        super().__init__(directory, DeviceGrant)

    @property
    def content(self) -> GroupKey:
        """The key that devices and the owner share."""
        return GroupKey(self.grant.fleet, "content", self.grant.content_key)

    @property
    def name(self) -> str:
        """The device's name."""
        return self.identity.name

    @property
    def index(self) -> int:
        """The device's place in the roster.

        Raises:
            UntrustedError: it is revoked, or listed with other keys.
        """
        for index, member in enumerate(self.roster.devices):
            if member == self.identity.member and self.name not in self.roster.revoked:
                return index
        raise UntrustedError(f"{self.name} is not in the fleet's roster any more", hint="ask the owner to add it again")

    def open_broadcast(self, payload: memoryview, signed: bytes) -> tuple[str, memoryview]:
        """Return (purpose, plaintext) of what the aggregator told the fleet.

        A run package that the owner made with newer secrets puts those in force; nothing else does.

        Args:
            payload: a group envelope.
            signed: its `Fingerprint.signed`.

        Raises:
            UntrustedError: another fleet's, or not the aggregator's.
            SealError: under no key that we hold, or altered.
        """
        head, at = read_head(payload)
        sender = aggregator_of(self.roster)
        if (head.fleet, head.sender) != (self.fleet, sender.name):
            raise UntrustedError(f"a message of {head.sender!r} in {head.fleet!r}")
        try:
            return head.purpose, open_from_group(self.group, payload, head, at, sender.sign_key, signed)
        except SealError:
            if self.next is None or head.purpose != "run":
                raise
        group = GroupKey(self.fleet, "broadcast", self.next.broadcast_key)
        plain = open_from_group(group, payload, head, at, sender.sign_key, signed)
        plan = open_document(decode(plain, RunPackage).plan, RunPlan, self.owner_key)
        if plan.roster_sequence < self.generation(self.next):
            raise UntrustedError(f"run {plan.run} under keys that are newer than its plan")
        self.promote()
        return head.purpose, plain

    def mask_secret(self) -> MaskSecret:
        """Return the secret that the fleet's masks are derived from."""
        from crypto.mask.secret import MaskSecret

        return MaskSecret.from_bytes(self.grant.mask_secret)


def init(directory: Path, name: str) -> Path:
    """Make the device's keys; return the card for the owner."""
    return make_identity(directory, name, DEVICE_ROLE)


def join(directory: Path, grant_file: bytes, owner_fingerprint: str) -> DeviceMembership:
    """Accept the owner's grant and return the membership."""
    accept_grant(directory, grant_file, DeviceGrant, owner_fingerprint)
    return DeviceMembership(directory)
