"""Who is there: what each device, or its last will, says of its newest life."""

from __future__ import annotations

from aggregator.membership import UNKNOWN_HINT, AggregatorMembership
from aggregator.rounds.events import CameOnline, WentOffline
from crypto.seal.envelope import SealError
from shoal.errors import UntrustedError
from shoal.protocol.codec import decode
from shoal.protocol.messages import Presence
from shoal.protocol.reassembly import Transfer


class DevicePresence:
    """Turns the presences of one fleet into events; remembers every device's newest birth."""

    def __init__(self, membership: AggregatorMembership) -> None:
        self._membership = membership
        self._births: dict[str, int] = {}

    def take(self, device: str, transfer: Transfer) -> CameOnline | WentOffline | None:
        """Return what a presence on ``device``'s topic says; None where it is the will of an earlier life.

        One that is the device's but sealed under secrets that were replaced since is the will of a connection from
        before, or comes from a device that has not got the newer ones yet: it is not there for this run.

        Raises:
            UntrustedError: nobody of the roster, or not the device's.
            WireError: malformed.
        """
        member = self._membership.roster.device(device)
        if member is None:
            raise UntrustedError(f"{device} is not in the roster", hint=UNKNOWN_HINT)
        try:
            plain = self._membership.open_from_device(member, transfer.payload, transfer.signed)
        except SealError:
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
