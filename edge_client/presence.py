"""A device's presence: online when it connects, offline when it leaves, or by its will when it is gone."""

from __future__ import annotations

from crypto.seal.envelope import seal_to_group
from edge_client.enrolment import DeviceMembership
from wire.codec import encode
from wire.frame import ChunkKind, split
from wire.messages import Presence, Sealed
from wire.topics import Topics
from wire.transport import Will


def presence(membership: DeviceMembership, birth: int, *, online: bool) -> Will:
    """Return topic and payload of the device's presence.

    Args:
        membership: who it is.
        birth: grows with every start of the device; a will of an earlier life is ignored by it.
        online: which of the two forms.
    """
    message = encode(Presence(membership.fleet, membership.name, birth, online))
    head = Sealed(membership.fleet, "presence", membership.name, "*")
    sealed = seal_to_group(membership.identity, membership.group, head, message)
    (chunk,) = split(sealed, kind=ChunkKind.STATE, round=0)
    return Topics(membership.fleet).state(membership.name), chunk
