"""Retained payloads: publish them in chunks under a base topic, and clear superseded chunks.

Example: a payload of three chunks at ``s/round`` is retained at ``s/round/0`` to ``s/round/2``. If one of a single chunk
replaces it, that chunk is retained at ``s/round``, and the other three topics are cleared.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, TypeVar

from shoal.protocol.chunking import ChunkKind, cut, transfer_id
from shoal.protocol.topics import chunk_topic
from shoal.transport.base import Transport
from shoal.transport.stored import STORED_FROM_BYTES, Handle, StoredBytes


class _Held(NamedTuple):
    """A payload as it was published: the arguments of `cut`, and its topics; an adopted payload is empty."""

    payload: bytes | StoredBytes
    kind: ChunkKind
    round: int
    name: bytes
    chunk_bytes: int
    topics: tuple[str, ...]


class RetainedPublisher:
    """Publishes retained transfers, and stores them to publish them again if the broker loses them.

    Args:
        transport: client of the broker.
        directory: large payloads are stored on its disk; None keeps all in memory.
    """

    def __init__(self, transport: Transport, directory: Path | None = None) -> None:
        self._transport, self._directory = transport, directory
        self._held: dict[str, _Held] = {}

    def publish(
        self, base: str, payload: bytes | StoredBytes, *, kind: ChunkKind, round_: int = 0, name: bytes | None = None
    ) -> bytes:
        """Publish ``payload`` at ``base`` in place of the previous one; return its transfer id.

        Pass ``name`` if that id is known. A payload of one chunk is published to ``base`` itself, a longer one to ``base/0``,
        ``base/1`` and so on.
        """
        name = transfer_id(bytes(payload)) if name is None else name
        if self._directory is not None and isinstance(payload, bytes):
            payload = out_of_memory(payload, self._directory)
        size = self._transport.chunk_bytes
        chunks = cut(payload, kind=kind, round=round_, chunk_bytes=size, name=name)
        topics = (base,) if len(chunks) == 1 else tuple(chunk_topic(base, i) for i in range(len(chunks)))
        before = self._held.get(base)
        self._held[base] = _Held(payload=payload, kind=kind, round=round_, name=name, chunk_bytes=size, topics=topics)
        for topic in set(before.topics if before else ()) - set(topics):
            self._transport.publish(topic, b"", retain=True)
        with self._transport.together():
            for topic, chunk in zip(topics, chunks, strict=True):
                self._transport.publish(topic, chunk, retain=True)
        return name

    def clear(self, base: str) -> None:
        """Remove the payload at ``base`` from the broker."""
        if base in self._held:
            for topic in self._held.pop(base).topics:
                self._transport.publish(topic, b"", retain=True)

    def adopt(self, topic: str) -> None:
        """Add a retained topic from an earlier process of this program, so that it can be cleared."""
        head, _, last = topic.rpartition("/")
        base = head if last.isdigit() else topic
        held = self._held.get(
            base, _Held(payload=b"", kind=ChunkKind.UPLOAD, round=0, name=b"", chunk_bytes=0, topics=())
        )
        if topic not in held.topics:
            self._held[base] = held._replace(topics=(*held.topics, topic))

    def bases(self) -> tuple[str, ...]:
        """Return the base topics of all payloads."""
        return tuple(self._held)

    def topics(self) -> tuple[str, ...]:
        """Return the topics of all chunks."""
        return tuple(t for held in self._held.values() for t in held.topics)

    @property
    def stale(self) -> bool:
        """Whether the broker has turned out to take no chunks as long as those of a payload: `republish` divides it again."""
        return any(
            min(held.chunk_bytes, len(held.payload)) > self._transport.chunk_bytes for held in self._held.values()
        )

    def republish(self) -> None:
        """Publish all payloads again, in chunks of the length that the broker takes now; it may have lost or refused them."""
        for base, held in list(self._held.items()):
            if held.payload:  # empty for an adopted topic: publishing it would clear the topic
                self.publish(base, held.payload, kind=held.kind, round_=held.round, name=held.name)


T = TypeVar("T")


def stored(write: Callable[[Callable[[bytes], object]], T], directory: Path) -> tuple[T, StoredBytes]:
    """Return the result of ``write``, and what it passes to the function that it is given, on the disk of ``directory``.

    Raises:
        OSError: the disk is full or fails.
    """
    with tempfile.TemporaryFile(dir=directory) as file:
        found = write(file.write)
        file.flush()
        return found, StoredBytes(Handle(os.dup(file.fileno())), 0, file.tell())


def out_of_memory(data: bytes, directory: Path) -> bytes | StoredBytes:
    """Return ``data`` from a file on the disk of ``directory``; the same object if it is short, or the disk is full or fails."""
    if len(data) < STORED_FROM_BYTES:
        return data
    try:
        return stored(lambda write: write(data), directory)[1]
    except OSError:
        return data
