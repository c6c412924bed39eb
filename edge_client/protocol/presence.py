"""A device's presences, and its receiving keys.

A presence is online when it connects, offline when it leaves, or through its MQTT will if the connection is lost.

With its presence a device publishes its receiving keys, which the owner needs for the next delivery of secrets. The presence
has the head of the run's transcript: the owner compares the heads of all devices.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final

from crypto.seal.envelope import (
    GroupKey,
    open_from_group,
    read_expected,
    seal_to_group,
)
from crypto.seal.identity import sign_document
from edge_client.protocol.session_io import Facts, OfferReceivingKeys, PublishPresence, Resubscribe
from shoal.protocol.channels import PRESENCE, RECEIVING
from shoal.protocol.chunking import parse, split
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import ReceivingNotice
from shoal.protocol.messages import (
    MOST_CONTRARY,
    ModelsHeld,
    Presence,
    Vitals,
)
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Will
from shoal.transport.rivals import Witness
from shoal.version import VERSION, WIRE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from edge_client.membership import DeviceMembership
    from shoal.protocol.states import TranscriptHead

SILENT_S: Final = 300.0
"""Longest time without any message until a device subscribes to announcement, notice and answers again: the broker may have
lost its subscriptions."""

PRESENCE_AGAIN_S: Final = 4.0
"""Longest time after a connection until a device publishes its presence once more and re-requests the announcement: a broker
may lose a retained message while another client subscribes to it."""

HEAD_EVERY: Final = 10
"""Rounds whose numbers are multiples of this end with a presence, so that all devices state their heads of the same rounds."""

Step = tuple["Attendance", tuple[PublishPresence | OfferReceivingKeys | Resubscribe, ...]]


def presence(
    membership: DeviceMembership,
    birth: int,
    *,
    online: bool,
    head: TranscriptHead | None = None,
    at_s: float | None = None,
    answers: int = 0,
    vitals: Vitals | None = None,
    left_out: int = 0,
    contrary: Sequence[str] = (),
    rival: int = 0,
    doubted: bool = False,
    held: ModelsHeld | None = None,
) -> Will:
    """Return topic and payload of the device's presence.

    Args:
        membership: the device's keys and fleet.
        birth: incarnation, which grows with every start of the device; it lets receivers ignore the will of an earlier one.
        online: whether the device is online or offline.
        head: the head of the run's transcript that the device knows.
        at_s: unix seconds; None for now. The aggregator compares them with its own clock.
        answers: number of the run whose finished model the device answers with; 0 without one.
        vitals: the device's condition; None if its operator has not asked for that.
        left_out: number of damaged samples that the device leaves out.
        contrary: devices that have signed another history or state of the run than this device was shown.
        rival: birth of a later program that uses the device's identity, and is to end; 0 for none.
        held: the models that the device could begin the next run of a standing order with.
        doubted: whether the model with which the device answers is right no more often than the device's most common label.
    """
    sent_at_s = int(time.time() if at_s is None else at_s)
    message = encode(
        Presence(
            membership.fleet,
            membership.name,
            birth,
            online,
            version=VERSION,
            sent_at_s=sent_at_s,
            head=head,
            answers=answers,
            vitals=vitals,
            wire=WIRE,
            left_out=left_out,
            contrary=tuple(contrary[:MOST_CONTRARY]),
            rival=rival,
            doubted=doubted,
            held=held,
        )
    )
    envelope = PRESENCE.head(membership.fleet, membership.name)
    sealed = seal_to_group(membership.identity, membership.group, envelope, message)
    (chunk,) = split(sealed, kind=PRESENCE.kind, round=0)
    return Topics(membership.fleet).state(membership.name), chunk


def witness(membership: DeviceMembership, birth: int) -> Witness:
    """Return what speaks for this start of the device, to find a copy of its directory."""

    def read(payload: bytes) -> tuple[int, int] | None:
        sealed = parse(payload)[1]
        head, at = read_expected(sealed, PRESENCE.head(membership.fleet, membership.name), "our presence")
        key = membership.identity.member.sign_key
        told = decode(open_from_group(membership.group, sealed, head, at, key), Presence)
        return (told.birth, told.rival) if told.online else None

    def present(rival: int) -> bytes:
        return presence(membership, birth, online=True, rival=rival)[1]

    return Witness(Topics(membership.fleet).state(membership.name), birth, present, read)


def receiving_notice(membership: DeviceMembership) -> Will:
    """Return topic and payload of the device's newest receiving keys."""
    assert membership.receiving is not None  # a device has loaded them
    notice = ReceivingNotice(membership.fleet, membership.name, membership.receiving.public)
    (chunk,) = split(sign_document(membership.identity, notice), kind=RECEIVING.kind, round=0)
    return Topics(membership.fleet).receiving(membership.name), chunk


@dataclass(frozen=True, slots=True)
class Attendance:
    """When a device publishes its presence, sealed under the broadcast key in use, and its receiving keys.

    Attributes:
        group: the broadcast key under which the presence was published last.
        repeat_s: time at which both are published once more; None before the first connection.
        settled: whether that has happened since; then ``repeat_s`` is the time of the next look for silence.
    """

    group: GroupKey | None = field(default=None, repr=False)
    repeat_s: float | None = None
    settled: bool = False

    def is_stale(self, facts: Facts) -> bool:
        """Whether the broadcast key has changed since the presence was last published."""
        return facts.group != self.group

    def announced(self, facts: Facts) -> Step:
        """Publish the presence: online."""
        return replace(self, group=facts.group), (PublishPresence(),)

    def connected(self, facts: Facts) -> Step:
        """Publish presence and receiving keys now, and once more `soon`."""
        return Attendance(facts.group).soon(facts), (PublishPresence(), OfferReceivingKeys())

    def soon(self, facts: Facts) -> Attendance:
        """Publish presence and receiving keys after half to all of PRESENCE_AGAIN_S seconds."""
        return replace(self, repeat_s=facts.within(PRESENCE_AGAIN_S), settled=False)

    def ticked(self, facts: Facts, heard_s: float = math.inf) -> Step:
        """Repeat presence and receiving keys if that is due; later subscribe again whenever no message has come for long.

        Args:
            facts: the surroundings.
            heard_s: time of the last message.
        """
        if self.repeat_s is None or facts.now_s < self.repeat_s:
            return self, ()
        later = replace(self, repeat_s=facts.within(SILENT_S), settled=True)
        if not self.settled:
            return replace(later, group=facts.group), (PublishPresence(), OfferReceivingKeys())
        return later, () if facts.now_s - heard_s < SILENT_S / 2 else (Resubscribe(TopicKind.CTL),)
