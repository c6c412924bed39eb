"""Turn presences of devices into events of the engine.

A presence is published by the device, or by the broker as the device's last will when the connection is lost. A will of
an earlier incarnation may arrive after the device has started again: it has a lower `Presence.birth` and is ignored.
Example: online with birth 5, then a will with birth 4, leaves the device online.
"""

from __future__ import annotations

from aggregator.membership import UNKNOWN_HINT, AggregatorMembership
from aggregator.rounds.events import CameOnline, WentOffline
from crypto.seal.envelope import SealError
from shoal.errors import UntrustedError
from shoal.protocol.codec import decode
from shoal.protocol.messages import Presence
from shoal.protocol.reassembly import Transfer


class DevicePresence:
    """Checks the presences of one fleet; remembers the newest incarnation of each device."""

    def __init__(self, membership: AggregatorMembership) -> None:
        self._membership = membership
        self._births: dict[str, int] = {}

    def take(self, device: str, transfer: Transfer) -> CameOnline | WentOffline | None:
        """Return the event of a presence on ``device``'s topic; None if it is of an earlier incarnation.

        Raises:
            UntrustedError: the device is not in the roster, or has not signed the presence.
            WireError: malformed.
        """
        member = self._membership.roster.device(device)
        if member is None:
            raise UntrustedError(f"{device} is not in the roster", hint=UNKNOWN_HINT)
        try:
            plain = self._membership.open_from_device(member, transfer.payload, transfer.signed)
        except SealError:
            # Sealed under an older key version: the will of an earlier connection, or a device that lacks the newer
            # keys. Either way the device can't take part in this run.
            if self._membership.is_presence_of(member, transfer.payload, transfer.signed):
                return WentOffline(device)
            raise
        presence = decode(plain, Presence)
        if (presence.fleet, presence.device) != (self._membership.fleet, device):
            raise UntrustedError(f"the presence of {presence.device!r} on {device}'s topic")
        if presence.birth < self._births.get(device, 0):
            return None
        self._births[device] = presence.birth
        return CameOnline(device) if presence.online else WentOffline(device)
