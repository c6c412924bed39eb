"""The sealed upload of the round that a device is in: on the disk before its first byte is sent, the same bytes ever after."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from edge_client.protocol.notes import UploadRef
from shoal import limits
from shoal.protocol.channels import UPLOAD
from shoal.protocol.chunking import Fingerprint, split

if TYPE_CHECKING:
    from crypto.seal.replay import ReplayWatermark
    from edge_client.protocol.notes import ControlMessages
    from shoal.transport.base import Qos, Transport


class UploadFile(Protocol):
    """Stores the upload of the current round; `edge_client.storage.state.DeviceState` is one."""

    def save_pending(self, mark: ReplayWatermark, transfer: bytes, sealed: bytes) -> None:
        """Store an upload durably, or without its bytes once it was answered."""


class Uplink:
    """One device's upload: sent to ``topic`` once, and after that what the aggregator asks for.

    The broker's acknowledgement of a chunk tells nothing of the aggregator, and costs both of them as much as a small
    message. So the first sending does without where all chunks of a fleet fit the aggregator's receive window: a broker
    would hold none of them back at QoS 1 either (ADR 18). What is asked for is also kept for an aggregator that is
    away.

    Args:
        files: keep the upload.
        transport: takes its chunks.
        notes: take the reminders of it.
        topic: of the device's uploads.
        sealed: what an earlier life has left; empty if nothing.
        birth: of this life, see `presence`.
    """

    def __init__(
        self, *, files: UploadFile, transport: Transport, notes: ControlMessages, topic: str, sealed: bytes, birth: int
    ) -> None:
        self._files = files
        self._transport = transport
        self._notes = notes
        self._topic = topic
        self._sealed = sealed
        self._turn = birth
        self._handed = True
        self._digest = b""

    def keep(self, mark: ReplayWatermark, transfer: bytes, sealed: bytes) -> None:
        """Keep an upload, durably."""
        self._files.save_pending(mark, transfer, sealed)
        self._sealed, self._digest = sealed, b""

    def forget(self, mark: ReplayWatermark, transfer: bytes) -> None:
        """Keep of an upload that was answered only that there was one."""
        if self._sealed:
            self.keep(mark, transfer, b"")

    def send(self, mark: ReplayWatermark, transfer: bytes, asked: tuple[int, ...] | None, devices: int) -> None:
        """Send the upload for the first time in a fleet of so many devices, or the chunks that were ``asked`` for.

        Those may still be on their way over a slow link; then nothing is sent.
        """
        if asked is not None:
            if self._busy():
                return
            self._turn += 1
        self._handed = False
        size = self._transport.chunk_bytes
        chunks = split(self._sealed, kind=UPLOAD.kind, round=mark.round, chunk_bytes=size, indices=asked, name=transfer)
        qos: Qos = UPLOAD.least_qos if asked is None and devices * len(chunks) <= limits.RECEIVE_MAXIMUM else 1
        for chunk in chunks:
            self._transport.publish(self._topic, chunk, qos=qos)

    def remind(self, mark: ReplayWatermark, transfer: bytes, run_id: bytes, *, reconnected: bool) -> None:
        """Make the aggregator answer, or ask for what it misses; nothing while that is still on its way to the broker."""
        if self._busy():
            return
        self._turn += reconnected
        self._digest = self._digest or Fingerprint.of(self._sealed).signed
        upload = UploadRef(transfer, self._digest, len(self._sealed))
        self._notes.remind(run_id, mark.round, upload, self._transport.chunk_bytes, self._turn)

    def _busy(self) -> bool:
        """Whether chunks may be on their way to the broker: what waits for it once they are not is something else."""
        self._handed = self._handed or not self._transport.pending()
        return not self._handed
