"""A record of a fleet's traffic: a broker that keeps every message, and the record as the aggregator opens it.

Traffic analysis by metadata: Danezis and Clayton, "Introducing Traffic Analysis" (2007). The fleet runs with real keys and seals.
"""

from __future__ import annotations

import hashlib
import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple
from unittest.mock import patch

import numpy as np

from aggregator.membership import AggregatorMembership
from crypto.mask.derivation import MaskKey
from crypto.mask.masking import unmask
from crypto.seal.envelope import open_from_member, read_head
from edge_client.learning import feedback, update
from edge_client.learning.data import Dataset
from shoal.owner.runs.plan import round_mask
from shoal.protocol.chunking import ChunkKind, parse
from shoal.protocol.codec import decode
from shoal.protocol.messages import Upload
from shoal.protocol.precision.codec import decode as decode_vector
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.recipe import LocalTraining, Recipe, as_settings
from shoal.protocol.topics import TopicKind
from shoal.protocol.topics import parse as parse_topic
from shoal.simulation.engine.metrics import adjusted_rand
from shoal.types import Float32Vector, MaskedVector
from shoal_lab.bench.attacks.lab import CLASSES, Attack, Lab, Result
from shoal_lab.loopback.fleet import LoopbackFleet
from shoal_lab.loopback.transport import Hop, Passage

LOGGER: Final = "shoal"


class Tap:
    """Records every message and forwards it unchanged."""

    def __init__(self) -> None:
        self.heard: list[Passage] = []

    def __call__(self, passage: Passage) -> Sequence[float]:
        """Record ``passage`` and deliver it once, at once."""
        self.heard.append(passage)
        return (0.0,)


class SeenUpload(NamedTuple):
    """An upload with a masked update (d,) float32, as the aggregator opens it, and the SHA-256 of the masked bytes."""

    head: Upload
    masked: Float32Vector
    digest: bytes


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
        found[digest] = SeenUpload(upload, decode_vector(raw, upload.length, upload.precision), digest)
    return list(found.values())


def recorded_grants(heard: Sequence[Passage], party: str) -> list[bytes]:
    """Return the sealed grants that the owner sent to a party over the broker."""
    return [data for name, data in whole(heard, TopicKind.KEYS, ChunkKind.GRANT) if name == party]


WHO: Final = "the MQTT broker, or whoever reads its traffic without TLS; it holds no key at all"
DEVICES: Final = 8
GROUPS: Final = 2
SAMPLES: Final = 60
ROUNDS: Final = 8
WINDOW: Final = 24
"""Bytes of an update that are looked for, at a time: six coordinates."""
LOCAL: Final = LocalTraining(epochs=3, batch_size=10, lr=0.1)
SPLIT_ONCE: Final = {"validate": "false", "eps1": "0.8", "warm_up": "3", "cool_down": "50"}
"""CFL without trials, and with one split in a short run."""


def found_in(vector: Float32Vector, traffic: bytes) -> bool:
    """Return whether any of eight stretches of ``vector`` (d,) that are not zeros occurs in ``traffic``."""
    raw = vector.astype("<f4").tobytes()
    starts = np.linspace(0, len(raw) - WINDOW, 8).astype(int) // 4 * 4
    pieces = (raw[at : at + WINDOW] for at in starts)
    return any(piece in traffic for piece in pieces if any(piece))


def groups_seen(heard: Sequence[Passage]) -> dict[str, str]:
    """Return client -> the model topic that it was last sent, from recorded traffic."""
    sent = ((passage.client, parse_topic(passage.topic)) for passage in heard if passage.hop is Hop.DOWN)
    return {client: topic.label for client, topic in sent if topic.kind is TopicKind.MODEL}


def senders_seen(heard: Sequence[Passage]) -> float:
    """Return the share of recorded uploads whose topic names the device that sent them."""
    uploads = [(p.client, parse_topic(p.topic)) for p in heard if p.hop is Hop.UP]
    named = [client.endswith(f"-{topic.device}") for client, topic in uploads if topic.kind is TopicKind.UP]
    return float(np.mean(named))


def broker(lab: Lab, mode: str) -> list[Result]:
    """Return the share of uploads of which bytes are found in the traffic, masked or clear, and what topics and clients tell.

    Groups are inferred from the model topic that each device is sent; their figure is the adjusted Rand index.
    """
    data, truth = _population(lab)
    options = Recipe("cfl", as_settings(SPLIT_ONCE), rounds=ROUNDS, mode=mode, local=LOCAL, min_contributors=1, seed=0)
    tap = Tap()
    with (
        tempfile.TemporaryDirectory(prefix="shoal-privacy-") as folder,
        LoopbackFleet(Path(folder), lab.bundle, data, options, tap, origins=lab.origin[None].copy()) as fleet,
    ):
        while not fleet.finished:
            fleet.step()
        fleet.settle()
        records = fleet.records()
        # With the aggregator's keys, to know what the broker should not find.
        uploads = recorded_uploads(tap.heard, AggregatorMembership(fleet.stage.aggregator_dir))
        masked = [(upload.head.round, upload.masked) for upload in uploads]
        keys = {round_: round_mask(fleet.stage.fleet, fleet.plan, round_) for round_, _ in masked}
        clients = [fleet.client_id(name) for name in fleet.stage.devices]
    clear = [unmask(MaskedVector(v, keys[round_].key_id), keys[round_]) for round_, v in masked]
    traffic = b"".join(p.payload for p in tap.heard)
    seen = [found_in(vector, traffic) for vector in (*(v for _, v in masked), *clear)]
    by_topic = groups_seen(tap.heard)
    found = adjusted_rand([by_topic.get(c, c) for c in clients], truth)
    really = adjusted_rand([records[-1]["clusters"].get(n, -1) for n in sorted(data)], truth)
    return [
        Result(
            name="broker: bytes of updates",
            attacker=WHO,
            success=float(np.mean(seen)),
            chance=0.0,
            unit="share",
            margin=0.0,
            note=f"{len(masked)} updates, masked and clear, in {len(traffic)} recorded bytes",
        ),
        Result(
            name="broker: groups by model topic",
            attacker=WHO,
            success=found,
            chance=0.0,
            unit="ARI",
            margin=0.1,
            note=f"the aggregator's own clusters have {really:.2f}",
        ),
        Result(
            name="broker: who uploads when",
            attacker=WHO,
            success=senders_seen(tap.heard),
            chance=1 / DEVICES,
            unit="share",
        ),
    ]


def _population(lab: Lab) -> tuple[dict[str, Dataset], list[int]]:
    data, truth = {}, []
    for i in range(DEVICES):
        images, group = lab.pick(f"broker {i}", SAMPLES), i % GROUPS
        data[f"dev-{i:02d}"] = Dataset(images.x, (images.y + group) % CLASSES)
        truth.append(group)
    return data, truth


ATTACKS: Final = (Attack("curious broker", "Danezis and Clayton 2007 (traffic analysis)", WHO, broker),)
