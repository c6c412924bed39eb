"""Retained payloads: publish them in chunks under a base topic, and clear superseded chunks.

Example: a payload of three chunks at ``s/round`` is retained at ``s/round/0`` to ``s/round/2``. If one of a single chunk
replaces it, that chunk is retained at ``s/round``, and the other three topics are cleared.
"""

from __future__ import annotations

from shoal.protocol.chunking import ChunkKind, split, transfer_id
from shoal.protocol.topics import chunk_topic
from shoal.transport.base import Transport


class RetainedPublisher:
    """Publishes retained transfers, and stores them to publish them again if the broker loses them.

    Args:
        transport: client of the broker.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._held: dict[str, dict[str, bytes]] = {}

    def publish(
        self, base: str, payload: bytes, *, kind: ChunkKind, round_: int = 0, name: bytes | None = None
    ) -> bytes:
        """Publish ``payload`` at ``base`` in place of the previous one; return its transfer id.

        Pass ``name`` if that id is known. A payload of one chunk is published to ``base`` itself, a longer one to ``base/0``,
        ``base/1`` and so on.
        """
        name = transfer_id(payload) if name is None else name
        chunks = split(payload, kind=kind, round=round_, chunk_bytes=self._transport.chunk_bytes, name=name)
        topics = [base] if len(chunks) == 1 else [chunk_topic(base, i) for i in range(len(chunks))]
        fresh = dict(zip(topics, chunks, strict=True))
        for topic in set(self._held.get(base, {})) - set(fresh):
            self._transport.publish(topic, b"", retain=True)
        self._held[base] = fresh
        for topic, chunk in fresh.items():
            self._transport.publish(topic, chunk, retain=True)
        return name

    def clear(self, base: str) -> None:
        """Remove the payload at ``base`` from the broker."""
        for topic in self._held.pop(base, {}):
            self._transport.publish(topic, b"", retain=True)

    def adopt(self, topic: str) -> None:
        """Add a retained topic from an earlier process of this program, so that it can be cleared."""
        head, _, last = topic.rpartition("/")
        base = head if last.isdigit() else topic
        self._held.setdefault(base, {}).setdefault(topic, b"")

    def bases(self) -> tuple[str, ...]:
        """Return the base topics of all payloads."""
        return tuple(self._held)

    def topics(self) -> tuple[str, ...]:
        """Return the topics of all chunks."""
        return tuple(t for held in self._held.values() for t in held)

    def republish(self) -> None:
        """Publish all payloads again; a broker that restarted may have lost them."""
        for held in self._held.values():
            for topic, chunk in held.items():
                if chunk:  # empty for an adopted topic, whose payload is unknown: publishing it would clear the topic
                    self._transport.publish(topic, chunk, retain=True)
