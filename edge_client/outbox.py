"""The sealed upload of the round that a device is in: on the disk before its first byte is sent, the same bytes ever after."""

from __future__ import annotations

from typing import TYPE_CHECKING

from wire import limits
from wire.frame import ChunkKind, split

if TYPE_CHECKING:
    from crypto.seal.replay import HighWater
    from edge_client.state import DeviceState
    from wire.transport import Qos, Transport


class Outbox:
    """One device's upload, sent to ``topic`` as often as it takes.

    The broker's acknowledgement of a chunk tells nothing of the aggregator, and costs both of them as much as a small
    message. So the first sending does without where all chunks of a fleet fit the aggregator's receive window: a broker
    would hold none of them back at QoS 1 either. What is sent again is also kept for an aggregator that is away
    (docs/adr/0018).
    """

    def __init__(self, files: DeviceState, transport: Transport, topic: str, sealed: bytes) -> None:
        """Take up what an earlier life has ``sealed``; empty where it has not."""
        self._files = files
        self._transport = transport
        self._topic = topic
        self._sealed = sealed
        self._tried = b""

    def keep(self, mark: HighWater, transfer: bytes, sealed: bytes) -> None:
        """Keep an upload, durably."""
        self._files.save_pending(mark, transfer, sealed)
        self._sealed = sealed

    def forget(self, mark: HighWater, transfer: bytes) -> None:
        """Keep of an upload that was answered only that there was one."""
        if self._sealed:
            self.keep(mark, transfer, b"")

    def send(self, mark: HighWater, transfer: bytes, indices: tuple[int, ...] | None, devices: int) -> None:
        """Send the upload, or only these chunks of it, in a fleet of so many devices."""
        again, self._tried = self._tried == transfer, transfer
        size = self._transport.chunk_bytes
        chunks = split(
            self._sealed, kind=ChunkKind.UPLOAD, round=mark.round, chunk_bytes=size, indices=indices, name=transfer
        )
        qos: Qos = 1 if again or devices * len(chunks) > limits.RECEIVE_MAXIMUM else 0
        for chunk in chunks:
            self._transport.publish(self._topic, chunk, qos=qos)
