"""A device's place in a fleet: its own keys, the mask secret and the content key."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from crypto.seal.envelope import GroupKey
from crypto.seal.grants import DEVICE_ROLE
from crypto.seal.membership import Membership, accept_grant, make_identity
from wire.documents import DeviceGrant
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
        self.content = GroupKey(self.grant.fleet, "content", self.grant.content_key)

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
