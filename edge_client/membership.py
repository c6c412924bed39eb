"""A device's place in a fleet: its own keys, the mask secret and the content key."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Final

from crypto.seal.envelope import GroupKey, open_from_member, read_head
from crypto.seal.signed import open_document
from shoal.errors import NotEnrolledError, UntrustedError
from shoal.membership.directory import Membership, accept_grant, make_identity
from shoal.membership.grants import DEVICE_ROLE
from shoal.membership.roster import aggregator_of
from shoal.protocol import channels
from shoal.protocol.codec import decode
from shoal.protocol.documents import DeviceGrant, RunPackage, RunPlan

if TYPE_CHECKING:
    from crypto.mask.secret import MaskSecret


REVOKED_HINT: Final = "this name and its keys are never taken again: init or enrol a new directory under another name"


class DeviceMembership(Membership[DeviceGrant]):
    """A device that belongs to a fleet.

    Attributes:
        index: its place in the roster, by which announcements address it.
    """

    def __init__(self, directory: Path) -> None:
        """Load what `join` left in ``directory``.

        Raises:
            NotEnrolledError: nobody has joined there.
            UntrustedError: the roster is not the owner's, or older than one that was in force before. One that has expired
                is taken up: how else would a newer one be heard of? See `expired`.
        """
        super().__init__(directory, DeviceGrant, expired=True)

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
        raise UntrustedError(f"{self.name} is not in the fleet's roster any more", hint=REVOKED_HINT)

    @property
    def listed(self) -> bool:
        """Whether the newest roster has this device in the fleet."""
        return self.roster.device(self.name) == self.identity.member

    def open_broadcast(self, payload: memoryview, signed: bytes) -> tuple[str, memoryview]:
        """Return (purpose, plaintext) of what the aggregator told the fleet.

        A run package that the owner made with newer secrets puts those in force. Anything else that comes under the
        newer broadcast key makes that the one we answer under: a rollover to the newer secrets is on its way.

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
        group, plain = self.open_under_any(payload, head, at, sender.sign_key, signed)
        if group.secret != self.grant.broadcast_key and head.purpose == channels.RUN.purpose and not self.expired:
            self._put_in_force(plain)
        if group != self.group:
            self.group = group
        return head.purpose, plain

    def open_own_roster(self, payload: memoryview, signed: bytes) -> bytes:
        """Return the roster that the aggregator has sealed to this device alone, as the owner signed it; not checked yet.

        Args:
            payload: a member envelope.
            signed: its `Fingerprint.signed`.

        Raises:
            UntrustedError: another fleet's, for another device, or not the aggregator's.
            SealError: not sealed to us, or altered.
        """
        head, at = read_head(payload)
        sender = aggregator_of(self.roster)
        if head != channels.REVOCATION.head(self.fleet, sender.name, self.name):
            raise UntrustedError(f"a {head.purpose} of {head.sender!r} where a roster for {self.name} belongs")
        plain, _ = open_from_member(self.identity, payload, head, at, sender.sign_key, signed)
        return bytes(plain)

    def _put_in_force(self, package: memoryview) -> None:
        """Go over to the secrets that a run was signed with; an older run may travel under newer ones' broadcast key."""
        plan = open_document(decode(package, RunPackage).plan, RunPlan, self.owner_key)
        grant = self.newer(plan.roster_sequence)
        if grant is not None:
            self.promote(grant)

    def grant_of(self, generation: int) -> DeviceGrant:
        """Return the grant whose secrets were drawn at roster ``generation``.

        Raises:
            NotEnrolledError: we have none of that generation.
        """
        for grant in (self.grant, *self.later):
            if grant.keys_since == generation:
                return grant
        raise NotEnrolledError(
            f"no keys of roster {generation} have come yet", hint="the owner leaves them with `shoal-fleet publish`"
        )

    def content_of(self, generation: int) -> GroupKey:
        """Return the key that devices and the owner share, of one generation of secrets."""
        return GroupKey(self.fleet, "content", self.grant_of(generation).content_key)

    def secret_at(self, generation: int, epoch: int) -> MaskSecret:
        """Return the mask secret of an epoch, from which the masks of that epoch are derived.

        Raises:
            NotEnrolledError: no secrets of that generation have come.
            IntegrityError: the epoch is over, and its secret erased.
        """
        from crypto.mask.secret import MaskSecret

        grant = self.grant_of(generation)
        return MaskSecret.from_bytes(grant.mask_secret).at(epoch, grant.mask_epoch)

    def enter(self, generation: int, epoch: int) -> None:
        """Put the secrets of a mask epoch in force and erase those before it, durably; going back changes nothing."""
        grant = self.newer(generation)
        if grant is not None and grant.keys_since == generation:
            self.promote(grant)
        if self.grant.keys_since == generation and self.grant.mask_epoch < epoch:
            secret = self.secret_at(generation, epoch)
            self._replace(dataclasses.replace(self.grant, mask_secret=secret.reveal(), mask_epoch=epoch))


def init(directory: Path, name: str) -> Path:
    """Make the device's keys; return the card for the owner."""
    return make_identity(directory, name, DEVICE_ROLE)


def join(directory: Path, grant_file: bytes, owner_fingerprint: str) -> DeviceMembership:
    """Accept the owner's grant and return the membership."""
    accept_grant(directory, grant_file, DeviceGrant, owner_fingerprint)
    return DeviceMembership(directory)
