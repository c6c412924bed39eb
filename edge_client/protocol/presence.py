"""A device's presence: online when it connects, offline when it leaves, or by its will when it is gone."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from crypto.seal.envelope import seal_to_group
from edge_client.membership import DeviceMembership
from shoal.errors import WireError
from shoal.protocol.channels import PRESENCE
from shoal.protocol.chunking import split
from shoal.protocol.codec import encode
from shoal.protocol.messages import Presence
from shoal.protocol.topics import Topics
from shoal.transport.base import Transport, Will

PRESENCE_AGAIN_S: Final = 4.0
"""A device says once more that it is there, and looks once more at what it was told: a broker may lose what is retained while
another client subscribes to it."""


def presence(membership: DeviceMembership, birth: int, *, online: bool) -> Will:
    """Return topic and payload of the device's presence.

    Args:
        membership: who it is.
        birth: grows with every start of the device; a will of an earlier life is ignored by it.
        online: which of the two forms.
    """
    message = encode(Presence(membership.fleet, membership.name, birth, online))
    head = PRESENCE.head(membership.fleet, membership.name)
    sealed = seal_to_group(membership.identity, membership.group, head, message)
    (chunk,) = split(sealed, kind=PRESENCE.kind, round=0)
    return Topics(membership.fleet).state(membership.name), chunk


class Attendance:
    """Says on a transport that a device is there, under the broadcast key in use, and goodbye."""

    def __init__(
        self, membership: DeviceMembership, transport: Transport, birth: int, uniform: Callable[[], float]
    ) -> None:
        """Take who it is, where it says so, the ``birth`` of this life, and a draw from [0, 1) for jitter."""
        self._membership = membership
        self._transport = transport
        self._birth = birth
        self._uniform = uniform
        self._told = membership.group
        self._repeat_s: float | None = None

    @property
    def stale(self) -> bool:
        """Whether another broadcast key is in use than what was said last is sealed under."""
        return self._membership.group != self._told

    def announce(self) -> None:
        """Say that the device is there."""
        self._told = self._membership.group
        self._transport.publish(*presence(self._membership, self._birth, online=True), retain=True)

    def connected(self, now_s: float) -> None:
        """Say so now, and once more in a while."""
        self.announce()
        self._repeat_s = now_s + PRESENCE_AGAIN_S * (0.5 + 0.5 * self._uniform())

    def tick(self, now_s: float) -> bool:
        """Say it once more where that is due; return whether it was."""
        if self._repeat_s is None or now_s < self._repeat_s:
            return False
        self._repeat_s = None
        self.announce()
        return True

    def leave(self) -> None:
        """Say goodbye, if anybody can still be told."""
        with suppress(WireError):  # closed by whoever took our name over, or too much waits
            self._transport.publish(*presence(self._membership, self._birth, online=False), retain=True)
