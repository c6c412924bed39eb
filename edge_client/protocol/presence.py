"""A device's presence: online when it connects, offline when it leaves, or through its MQTT will if the connection is lost.

With its presence a device publishes its receiving keys, which the owner needs for the next delivery of secrets.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from crypto.seal.envelope import seal_to_group
from crypto.seal.signed import sign_document
from edge_client.membership import DeviceMembership
from shoal.errors import WireError
from shoal.protocol.channels import PRESENCE, RECEIVING
from shoal.protocol.chunking import split
from shoal.protocol.codec import encode
from shoal.protocol.documents import ReceivingNotice
from shoal.protocol.messages import Presence
from shoal.protocol.topics import Topics
from shoal.transport.base import Transport, Will

PRESENCE_AGAIN_S: Final = 4.0
"""Longest time after a connection until a device publishes its presence once more and re-requests the announcement: a broker
may lose a retained message while another client subscribes to it."""


def presence(membership: DeviceMembership, birth: int, *, online: bool) -> Will:
    """Return topic and payload of the device's presence.

    Args:
        membership: the device's keys and fleet.
        birth: incarnation, which grows with every start of the device; it lets receivers ignore the will of an earlier one.
        online: whether the device is online or offline.
    """
    message = encode(Presence(membership.fleet, membership.name, birth, online))
    head = PRESENCE.head(membership.fleet, membership.name)
    sealed = seal_to_group(membership.identity, membership.group, head, message)
    (chunk,) = split(sealed, kind=PRESENCE.kind, round=0)
    return Topics(membership.fleet).state(membership.name), chunk


def receiving_notice(membership: DeviceMembership) -> Will:
    """Return topic and payload of the device's newest receiving keys."""
    assert membership.receiving is not None  # a device has loaded them
    notice = ReceivingNotice(membership.fleet, membership.name, membership.receiving.public)
    (chunk,) = split(sign_document(membership.identity, notice), kind=RECEIVING.kind, round=0)
    return Topics(membership.fleet).receiving(membership.name), chunk


class Attendance:
    """Publishes a device's presence, sealed under the broadcast key in use, and its receiving keys."""

    def __init__(
        self, membership: DeviceMembership, transport: Transport, birth: int, uniform: Callable[[], float]
    ) -> None:
        """Create it for one device; ``birth`` is its incarnation, and ``uniform`` draws from [0, 1) for jitter."""
        self._membership = membership
        self._transport = transport
        self._birth = birth
        self._uniform = uniform
        self._told = membership.group
        self._repeat_s: float | None = None

    @property
    def stale(self) -> bool:
        """Whether the broadcast key has changed since the presence was last published."""
        return self._membership.group != self._told

    def announce(self) -> None:
        """Publish the presence: online."""
        self._told = self._membership.group
        self._transport.publish(*presence(self._membership, self._birth, online=True), retain=True)

    def offer_keys(self) -> None:
        """Publish the newest receiving keys."""
        self._transport.publish(*receiving_notice(self._membership), retain=True)

    def connected(self, now_s: float) -> None:
        """Publish presence and receiving keys now, and once more after half to all of PRESENCE_AGAIN_S seconds."""
        self.announce()
        self.offer_keys()
        self._repeat_s = now_s + PRESENCE_AGAIN_S * (0.5 + 0.5 * self._uniform())

    def tick(self, now_s: float) -> bool:
        """Repeat presence and receiving keys if that is due; return whether it was."""
        if self._repeat_s is None or now_s < self._repeat_s:
            return False
        self._repeat_s = None
        self.announce()
        self.offer_keys()
        return True

    def leave(self) -> None:
        """Publish the presence: offline, if the transport still takes it."""
        with suppress(WireError):  # another client has taken our name over, or the send queue is full
            self._transport.publish(*presence(self._membership, self._birth, online=False), retain=True)
