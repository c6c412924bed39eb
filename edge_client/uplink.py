"""What a device sends on the topic of its uploads: its sealed upload, reminders and declines.

`Uplink` sends the sealed upload of a round, which is on disk before its first byte is sent and never changes. `ControlMessages`
sends short messages on the same topic.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from crypto.seal.envelope import (
    SealedMessage,
    seal_message_to_member,
)
from edge_client.storage.pending_upload import PendingUploadFiles, Residual, pieces_of, stored
from shoal import limits
from shoal.membership.roster import aggregator_of
from shoal.protocol import channels
from shoal.protocol.chunking import cut
from shoal.protocol.codec import encode
from shoal.protocol.documents import Member
from shoal.protocol.messages import (
    Announcement,
    Decline,
    DeclineReason,
    Reminder,
)
from shoal.transport.base import Qos, Transport, publish_in_chunks

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from crypto.seal.replay import ReplayWatermark
    from edge_client.membership import DeviceMembership
    from shoal.transport.stored import StoredBytes


class ControlMessages:
    """Sends declines and reminders on ``topic``, sealed to the aggregator and signed by the device."""

    def __init__(self, membership: DeviceMembership, transport: Transport, topic: str) -> None:
        self._membership = membership
        self._transport = transport
        self._topic = topic

    def decline(self, announcement: Announcement, reason: DeclineReason, model: int = 0) -> None:
        """Send a decline for an announcement; ``model`` as in `Decline`."""
        member = self._membership
        note = Decline(
            fleet=member.fleet,
            device=member.name,
            run_id=announcement.run_id,
            nonce=announcement.nonce,
            reason=reason,
            model=model,
        )
        self._send(channels.DECLINE, note, announcement.round)

    def remind(
        self,
        run_id: bytes,
        round_: int,
        upload: SealedMessage | _Piece,
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
        self,
        channel: channels.Channel,
        note: Decline | Reminder,
        round_: int,
        to: Member | None = None,
        topic: str = "",
    ) -> None:
        member = self._membership
        to = to or aggregator_of(member.roster)
        head = channel.head(member.fleet, member.name, to.name)
        parcel = seal_message_to_member(member.identity, to.seal_key, head, encode(note))
        publish_in_chunks(
            self._transport, topic or self._topic, parcel.payload, channel.kind, parcel.transfer_id, round_
        )


class _Piece(NamedTuple):
    """A `SealedMessage` of an upload, which may be on the disk."""

    payload: bytes | StoredBytes
    transfer_id: bytes
    signed: bytes

    @classmethod
    def of(cls, sealed: SealedMessage, stored: bytes | StoredBytes | None = None) -> _Piece:
        return cls(stored or sealed.payload, sealed.transfer_id, sealed.signed)


class Unacknowledged:
    """True while publishes are waiting for the broker's acknowledgement."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __bool__(self) -> bool:
        return self._transport.pending() > 0


class Uplink:
    """One device's upload: sent to ``topic`` once, then only those chunks that the aggregator asks for.

    The broker's acknowledgement of a chunk does not show that the aggregator has it, and costs both of them as much as a
    small message. So the first transmission uses QoS 0 if all chunks of a fleet fit the aggregator's receive window: a broker
    would hold none of them back at QoS 1 either (ADR 15). Retransmissions use QoS 1, so that the broker also stores them for
    an aggregator that is offline.

    Args:
        files: stores the upload.
        transport: sends its chunks.
        notes: sends reminders.
        topic: topic of the device's uploads.
        part_topic: returns the topic of the device's parts to the worker with this number.
        sealed: the upload stored before a restart; empty if absent.
        residual: what the stored upload left, for the next one; None if there is nothing.

    Attributes:
        busy: true while the broker has not acknowledged all messages of the device.
        residual: of the newest upload.
        workers: of the run that the device follows; none if its uploads travel in one piece.
    """

    def __init__(
        self,
        *,
        files: PendingUploadFiles,
        transport: Transport,
        notes: ControlMessages,
        topic: str,
        part_topic: Callable[[int], str],
        sealed: bytes,
        residual: Residual | None = None,
    ) -> None:
        self._files = files
        self._transport = transport
        self.busy = Unacknowledged(transport)
        self._notes = notes
        self._topic = topic
        self._part_topic = part_topic
        self.workers: tuple[Member, ...] = ()
        self._pieces: Sequence[_Piece] = [_Piece.of(piece) for piece in pieces_of(sealed)] if sealed else ()
        self._forgotten = not sealed
        self.residual = residual

    def keep(
        self,
        mark: ReplayWatermark,
        pieces: Sequence[SealedMessage],
        residual: Residual | None = None,
        private: bytes = b"",
    ) -> None:
        """Store an upload, its residual and the device's private values, durably and by one write.

        Args:
            mark: the replay watermark of its round.
            pieces: the upload: the header's message first, then the parts to workers, if there are any.
            residual: what the upload leaves.
            private: the private values before and after its round.
        """
        kept = self._files.save(mark, pieces[0].transfer_id, stored(pieces), residual, private)
        whole = len(pieces) == 1
        self._pieces = [_Piece.of(piece, kept if whole else None) for piece in pieces]
        self.residual, self._forgotten = residual, False

    def forget(self, mark: ReplayWatermark, transfer: bytes, private: bytes = b"") -> None:
        """Drop the bytes of an upload that was answered; its transfer id and the ``private`` values stay stored."""
        if not self._forgotten:
            self._files.save(mark, transfer, b"", None, private)
            self._pieces, self.residual, self._forgotten = (), None, True

    def release(self) -> None:
        """Drop an upload from memory that is not being sent: should it be asked for again, it is in its file."""
        self._pieces = ()

    def _sealed(self) -> Sequence[_Piece]:
        self._pieces = self._pieces or [_Piece.of(piece) for piece in pieces_of(self._files.load().sealed)]
        return self._pieces

    def send(self, mark: ReplayWatermark, asked: tuple[int, ...] | None, devices: int) -> None:
        """Send the upload for the first time in a fleet of ``devices``, or retransmit the chunks that were ``asked`` for."""
        header, *parts = self._sealed()
        self._publish(self._topic, header, channels.UPLOAD, mark, asked, devices)
        if asked is None:
            for worker, part in enumerate(parts):
                self._publish(self._part_topic(worker), part, channels.PART, mark, None, devices)

    def send_part(self, mark: ReplayWatermark, transfer: bytes, asked: tuple[int, ...]) -> None:
        """Retransmit the chunks of one part that its worker asked for; do nothing for another transfer."""
        for worker, part in enumerate(self._sealed()[1:]):
            if part.transfer_id == transfer:
                self._publish(self._part_topic(worker), part, channels.PART, mark, asked, 0)

    def _publish(
        self,
        topic: str,
        piece: _Piece,
        channel: channels.Channel,
        mark: ReplayWatermark,
        asked: tuple[int, ...] | None,
        devices: int,
    ) -> None:
        chunks = cut(
            piece.payload,
            kind=channel.kind,
            round=mark.round,
            chunk_bytes=self._transport.chunk_bytes,
            indices=asked,
            name=piece.transfer_id,
        )
        qos: Qos = channel.least_qos if asked is None and devices * len(chunks) <= limits.RECEIVE_MAXIMUM else 1
        with self._transport.together():
            for chunk in chunks:
                self._transport.publish(topic, chunk, qos=qos)

    def remind(self, mark: ReplayWatermark, run_id: bytes, turn: int) -> None:
        """Send a reminder; ``turn`` is the retransmission counter."""
        size = self._transport.chunk_bytes
        header, *parts = self._sealed()
        self._notes.remind(run_id, mark.round, header, size, turn)
        for worker, (member, part) in enumerate(zip(self.workers, parts, strict=False)):
            topic = self._part_topic(worker)
            self._notes.remind(run_id, mark.round, part, size, turn, worker=member, topic=topic)
