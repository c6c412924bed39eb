"""Turn presences of devices into events of the engine.

A presence is published by the device, or by the broker as the device's last will when the connection is lost. A will of
an earlier incarnation may arrive after the device has started again: it has a lower `Presence.birth` and is ignored.
Example: online with birth 5, then a will with birth 4, leaves the device online.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aggregator.membership import UNKNOWN_HINT, AggregatorMembership, signed_by
from aggregator.rounds.events import CameOnline, WentOffline
from crypto.seal.envelope import SealError
from shoal.errors import UntrustedError
from shoal.protocol.channels import PRESENCE
from shoal.protocol.codec import decode
from shoal.protocol.messages import Presence
from shoal.protocol.reassembly import Reassembler, Transfer
from shoal.protocol.topics import TopicKind, Topics

if TYPE_CHECKING:
    from aggregator.status.watch import FleetWatch
    from shoal.protocol.states import TranscriptHead
    from shoal.transport.base import Message, Transport


class DevicePresence:
    """Checks the presences of one fleet; remembers the newest incarnation of each device.

    Args:
        membership: the aggregator's.
        watch: records the presences for `status`; None records nothing.
        wire: wire version of the run that is served; None if none is. A device that does not speak it counts as offline.

    Attributes:
        heads: device -> the newest head of a transcript that it has stated.
    """

    def __init__(
        self, membership: AggregatorMembership, watch: FleetWatch | None = None, wire: int | None = None
    ) -> None:
        self._wire = wire
        self._membership = membership
        self._watch = watch
        self._births = {} if watch is None else watch.births
        self.heads: dict[str, TranscriptHead] = {}

    def take(self, device: str, transfer: Transfer, *, retained: bool = False) -> CameOnline | WentOffline | None:
        """Return the event of a presence on ``device``'s topic; None if it is of an earlier incarnation.

        Args:
            device: the device of the topic.
            transfer: its message.
            retained: whether the broker had stored it before we subscribed.

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
                if self._watch is not None:
                    self._watch.devices.went(device)
                return WentOffline(device)
            raise
        with signed_by(device):
            presence = decode(plain, Presence)
            if (presence.fleet, presence.device) != (self._membership.fleet, device):
                raise UntrustedError(f"a presence of {presence.device[:64]!r} of {presence.fleet[:64]!r}")
        newest = self._births.get(device, 0)
        # The program of the newest birth is to end: it runs in a copy of the device's directory.
        if presence.birth < newest and presence.rival != newest:
            return None
        self._births[device] = presence.birth
        if presence.head is not None:
            self.heads[device] = presence.head
        if self._watch is not None:
            self._watch.came(presence, retained=retained)
        speaks = self._wire in (None, presence.wire)
        return CameOnline(device) if presence.online and speaks else WentOffline(device)


class PresenceInbox:
    """Reads the presences of the fleet while no run is served, for `status` only.

    Args:
        membership: the aggregator's.
        watch: records them.
    """

    def __init__(self, membership: AggregatorMembership, watch: FleetWatch) -> None:
        self._membership = membership
        self._topics = Topics(membership.fleet)
        self._presences = DevicePresence(membership, watch)
        self._chunks = Reassembler(PRESENCE.largest, whole_transfers=1, max_per_source=1)

    def subscribe(self, transport: Transport) -> None:
        """Subscribe to the presences of all devices; repeat it after a reconnection, since the broker may have lost some."""
        transport.subscribe(self._topics.filter(TopicKind.STATE))

    def take(self, message: Message, now_s: float) -> None:
        """Record a message if it is a presence of a device in the roster.

        Args:
            message: on any topic of the fleet.
            now_s: monotonic seconds.

        Raises:
            UntrustedError: the device has not signed it.
            WireError: malformed, or too large.
        """
        parsed = self._topics.parse(message.topic)
        if parsed.kind is not TopicKind.STATE or not message.payload:
            return
        if self._membership.roster.device(parsed.device) is None:
            return
        self._chunks.expire(now_s)
        transfer = self._chunks.add(parsed.device, message.payload, now_s, PRESENCE.limit())
        if transfer is not None:
            self._presences.take(parsed.device, transfer, retained=message.retained)
