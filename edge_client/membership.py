"""A device's place in a fleet: its own keys, the mask secret, the content key and the secret of each key version."""

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
    from crypto.mask.schedule import VersionKey
    from crypto.mask.secret import MaskSecret


REVOKED_HINT: Final = "this name and its keys are never taken again: init or enrol a new directory under another name"


class DeviceMembership(Membership[DeviceGrant]):
    """A device that belongs to a fleet.

    Attributes:
        index: its index in the roster, by which announcements address it.
    """

    def __init__(self, directory: Path) -> None:
        """Load the membership that `join` has stored in ``directory``.

        An expired roster is accepted, since without it the device could not receive a newer one; see `expired`.

        Raises:
            NotEnrolledError: no device has joined there, or it has lost its receiving keys.
            UntrustedError: the roster is not signed by the owner, or older than one that was in force before.
        """
        super().__init__(directory, DeviceGrant, expired=True)

    @property
    def content(self) -> GroupKey:
        """The content key, which devices and the owner share."""
        return GroupKey(self.grant.fleet, "content", self.grant.content_key)

    @property
    def name(self) -> str:
        """The device's name."""
        return self.identity.name

    @property
    def index(self) -> int:
        """The device's index in the roster.

        Raises:
            UntrustedError: the device is revoked, or listed with other keys.
        """
        for index, member in enumerate(self.roster.devices):
            if member == self.identity.member and self.name not in self.roster.revoked:
                return index
        raise UntrustedError(f"{self.name} is not in the fleet's roster any more", hint=REVOKED_HINT)

    @property
    def listed(self) -> bool:
        """Whether the newest roster lists this device as a member."""
        return self.roster.device(self.name) == self.identity.member

    def open_broadcast(self, payload: memoryview, signed: bytes) -> tuple[str, memoryview]:
        """Open a message from the aggregator to the fleet; return its purpose and plaintext.

        A run package that the owner made with newer secrets puts those in force. Any message under a newer broadcast key
        makes that the key for our own messages, since a rollover to the newer secrets is about to start.

        Args:
            payload: a group envelope.
            signed: its `Fingerprint.signed`.

        Raises:
            UntrustedError: the message is of another fleet, or not from the aggregator.
            SealError: it is sealed under a key that we do not have, or altered.
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
        """Return the signed roster that the aggregator has sealed to this device alone; the owner's signature is not checked yet.

        Args:
            payload: a member envelope.
            signed: its `Fingerprint.signed`.

        Raises:
            UntrustedError: the message is of another fleet, for another device, or not from the aggregator.
            SealError: it is not sealed to us, or altered.
        """
        head, at = read_head(payload)
        sender = aggregator_of(self.roster)
        if head != channels.REVOCATION.head(self.fleet, sender.name, self.name):
            raise UntrustedError(f"a {head.purpose} of {head.sender!r} where a roster for {self.name} belongs")
        plain, _ = open_from_member(self.identity, payload, head, at, sender.sign_key, signed)
        return bytes(plain)

    def _put_in_force(self, package: memoryview) -> None:
        """Put the secrets of a run's plan in force; they may be older than the broadcast key that its package came under."""
        plan = open_document(decode(package, RunPackage).plan, RunPlan, self.owner_key)
        grant = self.newer(plan.roster_sequence)
        if grant is not None:
            self.promote(grant)

    def grant_of(self, generation: int) -> DeviceGrant:
        """Return the grant with the secrets of key version ``generation``.

        Raises:
            NotEnrolledError: we have no secrets of that key version.
        """
        for grant in (self.grant, *self.later):
            if grant.keys_since == generation:
                return grant
        raise NotEnrolledError(
            f"no keys of roster {generation} have come yet", hint="the owner leaves them with `shoal-fleet publish`"
        )

    def version_key(self, generation: int) -> VersionKey:
        """Return the secret of key version ``generation`` for the first run that the device has not begun under it.

        Call `keep_version` once a chain that was derived from it is stored.

        Raises:
            NotEnrolledError: we have no secrets of that key version.
        """
        from crypto.mask.schedule import VersionKey

        grant = self.grant_of(generation)
        return VersionKey(self.fleet, generation, grant.version_secret, grant.next_run)

    def keep_version(self, key: VersionKey) -> None:
        """Store a version's stepped secret, durably, and put that version in force; the secrets of older ones are erased.

        A key for an earlier run than the stored one changes nothing.

        Raises:
            NotEnrolledError: we have no secrets of that key version.
        """
        grant = self.grant_of(key.number)
        if key.next_run < grant.next_run:
            return
        stepped = dataclasses.replace(grant, version_secret=key.reveal(), next_run=key.next_run)
        if grant is self.grant:
            group = self.group  # messages may come under a newer version already
            self._replace(stepped)
            self.group = group
        else:
            self.promote(grant, stepped)

    def content_of(self, generation: int) -> GroupKey:
        """Return the content key of key version ``generation``."""
        return GroupKey(self.fleet, "content", self.grant_of(generation).content_key)

    def secret_at(self, generation: int, epoch: int) -> MaskSecret:
        """Return the mask secret of an epoch, from which the masks of that epoch are derived.

        Raises:
            NotEnrolledError: the secrets of that key version have not arrived.
            IntegrityError: the epoch is over, and its secret was erased.
        """
        from crypto.mask.secret import MaskSecret

        grant = self.grant_of(generation)
        return MaskSecret.from_bytes(grant.mask_secret).at(epoch, grant.mask_epoch)

    def enter(self, generation: int, epoch: int) -> None:
        """Put the secrets of a mask epoch in force and erase earlier ones, durably; do nothing for an earlier epoch."""
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
