"""Payloads that stay on the broker: published in chunks under a base topic, the superseded ones cleared."""

from __future__ import annotations

from shoal.protocol.chunking import ChunkKind, split, transfer_id
from shoal.protocol.topics import chunk_topic
from shoal.transport.base import Transport


class RetainedPublisher:
    """Publishes transfers that newcomers find on the broker, and remembers them for a broker that forgot.

    Args:
        transport: where to publish.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._held: dict[str, dict[str, bytes]] = {}

    def publish(
        self, base: str, payload: bytes, *, kind: ChunkKind, round_: int = 0, name: bytes | None = None
    ) -> bytes:
        """Publish ``payload`` in place of what ``base`` held; return its transfer id.

        ``name`` is that id where it is known already. A payload of one chunk lies at ``base`` itself, a longer one at
        ``base/0``, ``base/1`` and so on.
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
        """Remove what ``base`` holds from the broker."""
        for topic in self._held.pop(base, {}):
            self._transport.publish(topic, b"", retain=True)

    def adopt(self, topic: str) -> None:
        """Take over a retained topic that an earlier life of this program left on the broker, so that it can be cleared."""
        head, _, last = topic.rpartition("/")
        base = head if last.isdigit() else topic
        self._held.setdefault(base, {}).setdefault(topic, b"")

    def bases(self) -> tuple[str, ...]:
        """Return every base topic that holds something."""
        return tuple(self._held)

    def topics(self) -> tuple[str, ...]:
        """Return every topic that holds a chunk."""
        return tuple(t for held in self._held.values() for t in held)

    def republish(self) -> None:
        """Publish everything again: after a reconnect the broker may have lost it."""
        for held in self._held.values():
            for topic, chunk in held.items():
                if chunk:  # what was adopted from an earlier life is only there to be cleared
                    self._transport.publish(topic, chunk, retain=True)
