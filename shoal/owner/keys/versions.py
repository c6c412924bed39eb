"""The secrets of earlier key versions, which open the final models of a run that ended before the owner drew newer ones.

A run that is under way takes up a newer version at its next round. Its last round may still be under an older one, and the
owner does not see from here when a run ends. So each draw after the first signed run stores the secrets that it replaces. Key
versions never go back, so `shoal-fleet models get` removes all that are older than the one that it needed.
An owner who never fetches models stores at most MOST_VERSIONS.

Example: run 1 is signed under version 4, and the owner admits a device, which draws version 7. Versions 4 and 7 are known. The
models of run 1 turn out to be under version 7, so version 4 is removed.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from shoal.protocol.codec import U32, Fixed32, decode, encode, message

VERSIONS_FILE: Final = "versions.bin"
MOST_VERSIONS: Final = 64
"""Most earlier versions that are stored; the oldest is removed first."""


@message(101)
@dataclass(frozen=True, slots=True)
class VersionSecrets:
    """The secrets of one key version that open what the fleet sealed under it.

    Attributes:
        number: the key version.
        version_secret: as drawn, see `crypto.mask.schedule.VersionKey`.
        broadcast_key: key of the messages to the whole fleet.
    """

    number: U32
    version_secret: Fixed32 = field(repr=False)
    broadcast_key: Fixed32 = field(repr=False)


@message(102)
@dataclass(frozen=True, slots=True)
class StoredVersions:
    """Contents of versions.bin, mode 0600, in ascending order of their numbers."""

    versions: tuple[VersionSecrets, ...] = ()

    @classmethod
    def from_bytes(cls, data: bytes) -> StoredVersions:
        """Decode the file.

        Raises:
            WireError: it is malformed.
        """
        return decode(data, cls)

    def to_bytes(self) -> bytes:
        """Return the file's contents."""
        return encode(self)

    def adding(self, secrets: VersionSecrets) -> StoredVersions:
        """Return these versions and one more, which replaces any of the same number."""
        found = {v.number: v for v in (*self.versions, secrets)}
        return StoredVersions(tuple(found[number] for number in sorted(found)[-MOST_VERSIONS:]))

    def since(self, number: int) -> StoredVersions:
        """Return these versions without those before ``number``."""
        return StoredVersions(tuple(v for v in self.versions if v.number >= number))
