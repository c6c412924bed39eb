"""The record that broker and aggregator have of a fleet, and the clear updates by which attacks are scored."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final
from unittest.mock import patch

from aggregator.membership import AggregatorMembership
from crypto.mask.derivation import MaskKey
from crypto.seal.envelope import open_from_member, read_head
from edge_client.learning import feedback, update
from shoal.protocol.chunking import ChunkKind, parse
from shoal.protocol.codec import decode
from shoal.protocol.messages import Upload
from shoal.protocol.precision.codec import decode as decode_vector
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.topics import TopicKind
from shoal.protocol.topics import parse as parse_topic
from shoal.transport.faults import Hop, Passage
from shoal.types import Float32Vector

LOGGER: Final = "shoal"


class Tap:
    """Records every message and forwards it unchanged."""

    def __init__(self) -> None:
        self.heard: list[Passage] = []

    def __call__(self, passage: Passage) -> Sequence[float]:
        """Record ``passage`` and deliver it once, at once."""
        self.heard.append(passage)
        return (0.0,)


@dataclass(frozen=True, slots=True, kw_only=True)
class SeenUpload:
    """An upload with a masked update, as the aggregator opens it.

    Attributes:
        device, round, key_version: from its header.
        key_id: 16 bytes, names the mask.
        masked: (d,), float32.
        digest: SHA-256 of the masked bytes.
    """

    device: str
    round: int
    key_version: int
    key_id: bytes
    masked: Float32Vector = field(repr=False)
    digest: bytes = field(repr=False)


@dataclass(frozen=True, slots=True)
class Masking:
    """One update that a device masked: its clear form (d,), float32, and the key."""

    clear: Float32Vector = field(repr=False)
    key: MaskKey


@contextmanager
def watched_masking() -> Iterator[dict[bytes, Masking]]:
    """Return, by the SHA-256 of the masked bytes, the updates that devices of this process mask inside the block.

    It is the truth that attacks are scored by; no attacker has it.
    """
    seen: dict[bytes, Masking] = {}

    def encode_update(
        clear: Float32Vector, key: MaskKey, precision: str, seed: bytes, cuts: tuple[tuple[int, int], ...] = ()
    ) -> feedback.Encoded:
        encoded = feedback.encode_update(clear, key, precision, seed, cuts)
        seen[hashlib.sha256(encoded.body).digest()] = Masking(clear.copy(), key)
        return encoded

    with patch.object(update, "encode_update", encode_update):
        yield seen


@contextmanager
def quiet_fleet() -> Iterator[None]:
    """Suppress the fleet's own log inside the block: a newcomer refuses messages under keys that it lacks, and logs that."""
    logger = logging.getLogger(LOGGER)
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        logger.setLevel(before)


def whole(heard: Sequence[Passage], topic: TopicKind, kind: ChunkKind) -> list[tuple[str, bytes]]:
    """Return (device or party of the topic, payload) of each transfer that was sent to the broker, in order."""
    found, reassembler = [], Reassembler()
    for passage in heard:
        if passage.hop is not Hop.UP or not passage.payload:
            continue
        to = parse_topic(passage.topic)
        if to.kind is not topic or parse(passage.payload)[0].kind is not kind:
            continue
        transfer = reassembler.add(passage.client, passage.payload, 0.0)
        if transfer is not None:
            found.append((to.device, bytes(transfer.payload)))
    return found


def recorded_uploads(heard: Sequence[Passage], aggregator: AggregatorMembership) -> list[SeenUpload]:
    """Return the masked updates in recorded traffic, opened with the aggregator's keys, each once, in order."""
    found: dict[bytes, SeenUpload] = {}
    for device, sealed in whole(heard, TopicKind.UP, ChunkKind.UPLOAD):
        member = aggregator.roster.device(device)
        if member is None:
            continue
        head, at = read_head(sealed)
        signed, body = open_from_member(aggregator.identity, sealed, head, at, member.sign_key)
        upload = decode(signed, Upload)
        if not upload.length:
            continue
        raw = bytes(body[: encoded_bytes(upload.length, upload.precision)])
        digest = hashlib.sha256(raw).digest()
        found[digest] = SeenUpload(
            device=device,
            round=upload.round,
            key_version=upload.key_version,
            key_id=upload.key_id,
            masked=decode_vector(raw, upload.length, upload.precision),
            digest=digest,
        )
    return list(found.values())


def recorded_grants(heard: Sequence[Passage], party: str) -> list[bytes]:
    """Return the sealed grants that the owner sent to a party over the broker."""
    return [data for name, data in whole(heard, TopicKind.KEYS, ChunkKind.GRANT) if name == party]
