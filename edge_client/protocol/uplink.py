"""Sending of the sealed upload of a round. It is on disk before its first byte is sent, and its bytes never change."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from edge_client.upload_pieces import pieces_of, stored
from shoal import limits
from shoal.protocol.channels import PART, UPLOAD
from shoal.protocol.chunking import split

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from crypto.seal.envelope import SealedMessage
    from crypto.seal.replay import ReplayWatermark
    from edge_client.protocol.notes import ControlMessages
    from shoal.protocol.channels import Channel
    from shoal.protocol.documents import Member
    from shoal.transport.base import Qos, Transport


R = TypeVar("R")
R_contra = TypeVar("R_contra", contravariant=True)
"""A residual; here it is only handed on."""


class UploadFile(Protocol[R_contra]):
    """Stores the upload of the current round; `edge_client.storage.pending_upload.PendingUploadFiles` is one."""

    def save(
        self,
        mark: ReplayWatermark,
        transfer: bytes,
        sealed: bytes,
        residual: R_contra | None = None,
        private: bytes = b"",
    ) -> None:
        """Store an upload durably, with its residual and private values; once it was answered, ``sealed`` is empty."""


class Unacknowledged:
    """True while publishes are waiting for the broker's acknowledgement."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def __bool__(self) -> bool:
        return self._transport.pending() > 0


class Uplink(Generic[R]):
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
        files: UploadFile[R],
        transport: Transport,
        notes: ControlMessages,
        topic: str,
        part_topic: Callable[[int], str],
        sealed: bytes,
        residual: R | None = None,
    ) -> None:
        self._files = files
        self._transport = transport
        self.busy = Unacknowledged(transport)
        self._notes = notes
        self._topic = topic
        self._part_topic = part_topic
        self.workers: tuple[Member, ...] = ()
        self._pieces: Sequence[SealedMessage] = pieces_of(sealed) if sealed else ()
        self.residual = residual

    def keep(
        self,
        mark: ReplayWatermark,
        pieces: Sequence[SealedMessage],
        residual: R | None = None,
        private: bytes = b"",
    ) -> None:
        """Store an upload, its residual and the device's private values, durably and by one write.

        Args:
            mark: the replay watermark of its round.
            pieces: the upload: the header's message first, then the parts to workers, if there are any.
            residual: what the upload leaves.
            private: the private values before and after its round.
        """
        self._files.save(mark, pieces[0].transfer_id, stored(pieces), residual, private)
        self._pieces, self.residual = pieces, residual

    def forget(self, mark: ReplayWatermark, transfer: bytes, private: bytes = b"") -> None:
        """Drop the bytes of an upload that was answered; its transfer id and the ``private`` values stay stored."""
        if self._pieces:
            self._files.save(mark, transfer, b"", None, private)
            self._pieces, self.residual = (), None

    def send(self, mark: ReplayWatermark, asked: tuple[int, ...] | None, devices: int) -> None:
        """Send the upload for the first time in a fleet of ``devices``, or retransmit the chunks that were ``asked`` for."""
        header, *parts = self._pieces
        self._publish(self._topic, header, UPLOAD, mark, asked, devices)
        if asked is None:
            for worker, part in enumerate(parts):
                self._publish(self._part_topic(worker), part, PART, mark, None, devices)

    def send_part(self, mark: ReplayWatermark, transfer: bytes, asked: tuple[int, ...]) -> None:
        """Retransmit the chunks of one part that its worker asked for; do nothing for another transfer."""
        for worker, part in enumerate(self._pieces[1:]):
            if part.transfer_id == transfer:
                self._publish(self._part_topic(worker), part, PART, mark, asked, 0)

    def _publish(
        self,
        topic: str,
        piece: SealedMessage,
        channel: Channel,
        mark: ReplayWatermark,
        asked: tuple[int, ...] | None,
        devices: int,
    ) -> None:
        chunks = split(
            piece.payload,
            kind=channel.kind,
            round=mark.round,
            chunk_bytes=self._transport.chunk_bytes,
            indices=asked,
            name=piece.transfer_id,
        )
        qos: Qos = channel.least_qos if asked is None and devices * len(chunks) <= limits.RECEIVE_MAXIMUM else 1
        for chunk in chunks:
            self._transport.publish(topic, chunk, qos=qos)

    def remind(self, mark: ReplayWatermark, run_id: bytes, turn: int) -> None:
        """Send a reminder; ``turn`` is the retransmission counter."""
        size = self._transport.chunk_bytes
        header, *parts = self._pieces
        self._notes.remind(run_id, mark.round, header, size, turn)
        for worker, (member, part) in enumerate(zip(self.workers, parts, strict=False)):
            topic = self._part_topic(worker)
            self._notes.remind(run_id, mark.round, part, size, turn, worker=member, topic=topic)
