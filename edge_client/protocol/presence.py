"""What a device sends besides its data: presences, its sealed upload, reminders and declines.

Its presence is online when it connects, offline when it leaves, or through its MQTT will if the connection is lost.

With its presence a device publishes its receiving keys, which the owner needs for the next delivery of secrets. The presence
has the head of the run's transcript: the owner compares the heads of all devices.

`Uplink` sends the sealed upload of a round, which is on disk before its first byte is sent and never changes. `ControlMessages`
sends short messages on the topic of the uploads.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Protocol, TypeVar

from crypto.seal.envelope import (
    GroupKey,
    SealedMessage,
    open_from_group,
    read_head,
    seal_message_to_member,
    seal_to_group,
)
from crypto.seal.identity import sign_document
from edge_client.protocol.session_io import Facts, OfferReceivingKeys, PublishPresence, Resubscribe
from edge_client.upload_pieces import pieces_of, stored
from shoal import limits
from shoal.errors import UntrustedError
from shoal.membership.roster import aggregator_of
from shoal.protocol import channels
from shoal.protocol.channels import PART, PRESENCE, RECEIVING, UPLOAD, Channel
from shoal.protocol.chunking import cut, parse, split
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import Member, ReceivingNotice
from shoal.protocol.messages import (
    MOST_CONTRARY,
    Announcement,
    Decline,
    DeclineReason,
    ModelsHeld,
    Presence,
    Reminder,
    Vitals,
)
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Qos, Transport, Will, publish_in_chunks
from shoal.transport.rivals import Witness
from shoal.version import VERSION, WIRE

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from crypto.seal.replay import ReplayWatermark
    from edge_client.membership import DeviceMembership
    from shoal.protocol.states import TranscriptHead
    from shoal.transport.stored import StoredBytes

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
        head, at = read_head(sealed)
        if head != PRESENCE.head(membership.fleet, membership.name):
            raise UntrustedError("another message in place of our presence")
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
        return replace(self, repeat_s=_within(PRESENCE_AGAIN_S, facts), settled=False)

    def ticked(self, facts: Facts, heard_s: float = math.inf) -> Step:
        """Repeat presence and receiving keys if that is due; later subscribe again whenever no message has come for long.

        Args:
            facts: the surroundings.
            heard_s: time of the last message.
        """
        if self.repeat_s is None or facts.now_s < self.repeat_s:
            return self, ()
        later = replace(self, repeat_s=_within(SILENT_S, facts), settled=True)
        if not self.settled:
            return replace(later, group=facts.group), (PublishPresence(), OfferReceivingKeys())
        return later, () if facts.now_s - heard_s < SILENT_S / 2 else (Resubscribe(TopicKind.CTL),)


def _within(longest_s: float, facts: Facts) -> float:
    """Return a random time between half of ``longest_s`` seconds from now and all of it."""
    return facts.now_s + longest_s * (0.5 + 0.5 * facts.jitter)


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
        self, channel: Channel, note: Decline | Reminder, round_: int, to: Member | None = None, topic: str = ""
    ) -> None:
        member = self._membership
        to = to or aggregator_of(member.roster)
        head = channel.head(member.fleet, member.name, to.name)
        parcel = seal_message_to_member(member.identity, to.seal_key, head, encode(note))
        publish_in_chunks(
            self._transport, topic or self._topic, parcel.payload, channel.kind, parcel.transfer_id, round_
        )


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
    ) -> bytes | StoredBytes:
        """Store an upload durably, with its residual and private values; once it was answered, ``sealed`` is empty.

        Returns:
            ``sealed``, read from where it is stored if it is long.
        """

    def load(self) -> Any:
        """Return the newest stored upload, whose bytes are its ``sealed``."""


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
        self._pieces: Sequence[_Piece] = [_Piece.of(piece) for piece in pieces_of(sealed)] if sealed else ()
        self._forgotten = not sealed
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
        self._publish(self._topic, header, UPLOAD, mark, asked, devices)
        if asked is None:
            for worker, part in enumerate(parts):
                self._publish(self._part_topic(worker), part, PART, mark, None, devices)

    def send_part(self, mark: ReplayWatermark, transfer: bytes, asked: tuple[int, ...]) -> None:
        """Retransmit the chunks of one part that its worker asked for; do nothing for another transfer."""
        for worker, part in enumerate(self._sealed()[1:]):
            if part.transfer_id == transfer:
                self._publish(self._part_topic(worker), part, PART, mark, asked, 0)

    def _publish(
        self,
        topic: str,
        piece: _Piece,
        channel: Channel,
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
