"""The devices' receiving keys as the owner knows them, and the key to which the next grant for each device is sealed.

- Keys with a lower first number than those known are never taken: an old notice that a broker repeats has no effect.
- Each draw of new secrets moves on to the next key. Two deliveries may so wait for one device: it erases the first one's key
  before it opens the second.
- A device that has published none for longer than its keys last gets all further grants under its last key.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final

from shoal.errors import IntegrityError
from shoal.protocol.codec import U32, decode, encode, message
from shoal.protocol.documents import ReceivingKeys

RECEIVING_FILE: Final = "receiving.bin"


@message(99)
@dataclass(frozen=True, slots=True)
class DeviceKeys:
    """One device's entry.

    Attributes:
        receiving: its newest keys.
        next: number of the key for the newest secrets; above ``receiving.last`` if the keys did not last.
    """

    name: str
    receiving: ReceivingKeys
    next: U32

    @property
    def number(self) -> int:
        """Number of the key to seal to."""
        return min(max(self.next, self.receiving.first), self.receiving.last)

    @property
    def exhausted(self) -> bool:
        """Whether the last key serves for more than one delivery."""
        return self.next > self.receiving.last

    def taking(self, receiving: ReceivingKeys) -> DeviceKeys:
        """Return the entry with ``receiving``, or this one if it has newer keys."""
        return replace(self, receiving=receiving) if receiving.first > self.receiving.first else self


@message(100)
@dataclass(frozen=True, slots=True)
class ReceivingFile:
    """Contents of receiving.bin, in the order of names."""

    devices: tuple[DeviceKeys, ...]


@dataclass(frozen=True, slots=True)
class ReceivingBook:
    """All devices' receiving keys, by name."""

    devices: Mapping[str, DeviceKeys] = field(default_factory=dict)

    @classmethod
    def from_bytes(cls, data: bytes) -> ReceivingBook:
        """Read what `to_bytes` returned.

        Raises:
            WireError: the bytes are malformed.
        """
        return cls({entry.name: entry for entry in decode(data, ReceivingFile).devices})

    def to_bytes(self) -> bytes:
        """Return the contents of the file."""
        return encode(ReceivingFile(tuple(entry for _, entry in sorted(self.devices.items()))))

    def of(self, name: str) -> DeviceKeys:
        """Return a device's entry.

        Raises:
            IntegrityError: the key does not exist.
        """
        found = self.devices.get(name)
        if found is None:
            raise IntegrityError(
                f"{RECEIVING_FILE} has no keys of device {name!r}",
                hint="take the whole directory from a backup, or add the device's card again: shoal-fleet add-device",
            )
        return found

    def admitting(self, found: Mapping[str, ReceivingKeys]) -> ReceivingBook:
        """Return the book with the new devices in ``found``, in place of any others of their names."""
        new = {name: DeviceKeys(name, receiving, receiving.first) for name, receiving in found.items()}
        return ReceivingBook({**self.devices, **new})

    def taking(self, found: Mapping[str, ReceivingKeys]) -> ReceivingBook:
        """Return the book with the keys in ``found`` that are newer; devices that it does not list are left out."""
        newer = {name: self.devices[name].taking(keys) for name, keys in found.items() if name in self.devices}
        return ReceivingBook({**self.devices, **newer})

    def advanced(self, names: Iterable[str]) -> ReceivingBook:
        """Return the book for newer secrets: each of the devices ``names`` moves on to its next key."""
        entries = map(self.of, names)
        moved = {e.name: replace(e, next=max(e.next, e.receiving.first) + 1) for e in entries}
        return ReceivingBook({**self.devices, **moved})
