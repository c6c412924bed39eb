"""Short messages from a device to the aggregator on the topic of its uploads."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crypto.seal.envelope import seal_message_to_member
from shoal.membership.roster import aggregator_of
from shoal.protocol import channels
from shoal.protocol.chunking import split
from shoal.protocol.codec import encode
from shoal.protocol.messages import Decline, Reminder

if TYPE_CHECKING:
    from crypto.seal.envelope import SealedMessage
    from edge_client.membership import DeviceMembership
    from shoal.protocol.channels import Channel
    from shoal.protocol.documents import Member
    from shoal.protocol.messages import Announcement, DeclineReason
    from shoal.transport.base import Transport


class ControlMessages:
    """Sends declines and reminders on ``topic``, sealed to the aggregator and signed by the device."""

    def __init__(self, membership: DeviceMembership, transport: Transport, topic: str) -> None:
        self._membership = membership
        self._transport = transport
        self._topic = topic

    def decline(self, announcement: Announcement, reason: DeclineReason) -> None:
        """Send a decline for an announcement."""
        member = self._membership
        note = Decline(member.fleet, member.name, announcement.run_id, announcement.nonce, reason)
        self._send(channels.DECLINE, note, announcement.round)

    def remind(
        self,
        run_id: bytes,
        round_: int,
        upload: SealedMessage,
        chunk_bytes: int,
        turn: int,
        *,
        worker: Member | None = None,
        topic: str = "",
    ) -> None:
        """Send a reminder of ``upload``; of a part, to ``worker`` at ``topic``. Other arguments are those of `Reminder`."""
        member = self._membership
        reminder = Reminder(
            fleet=member.fleet,
            device=member.name,
            run_id=run_id,
            round=round_,
            transfer=upload.transfer_id,
            digest=upload.signed,
            size=len(upload.payload),
            chunk_bytes=chunk_bytes,
            turn=turn,
        )
        if worker is None:
            self._send(channels.REMINDER, reminder, round_)
        else:
            self._send(channels.PART_REMINDER, reminder, round_, worker, topic)

    def _send(
        self, channel: Channel, note: Decline | Reminder, round_: int, to: Member | None = None, topic: str = ""
    ) -> None:
        member = self._membership
        to = to or aggregator_of(member.roster)
        head = channel.head(member.fleet, member.name, to.name)
        parcel = seal_message_to_member(member.identity, to.seal_key, head, encode(note))
        for chunk in split(parcel.payload, kind=channel.kind, round=round_, name=parcel.transfer_id):
            self._transport.publish(topic or self._topic, chunk)
