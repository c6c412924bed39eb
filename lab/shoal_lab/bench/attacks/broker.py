"""A broker that records all messages of a whole fleet, which runs with real keys and seals.

The attack searches the bytes for any part of an update, masked or clear, and infers groups from the model that each device is
sent. Traffic analysis by metadata: Danezis and Clayton, "Introducing Traffic Analysis" (2007).
"""

from __future__ import annotations

import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np

from aggregator.membership import AggregatorMembership
from crypto.mask.masking import unmask
from edge_client.learning.data import Dataset
from shoal.owner.runs.masks import round_mask
from shoal.owner.runs.plan import RunOptions
from shoal.protocol.topics import TopicKind, parse
from shoal.simulation.engine.metrics import adjusted_rand
from shoal.simulation.loopback_fleet import LoopbackFleet
from shoal.task.manifest import LocalTraining
from shoal.transport.faults import Hop, Passage
from shoal.types import Float32Vector, MaskedVector
from shoal_lab.bench.attacks.base import Attack, Result
from shoal_lab.bench.attacks.lab import CLASSES, Lab
from shoal_lab.bench.attacks.past.recording import Tap, recorded_uploads

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
    last: dict[str, Counter[str]] = defaultdict(Counter)
    for number, passage in enumerate(heard):
        topic = parse(passage.topic)
        if passage.hop is Hop.DOWN and topic.kind is TopicKind.MODEL:
            last[passage.client][topic.label] = number
    return {client: labels.most_common(1)[0][0] for client, labels in last.items()}


def senders_seen(heard: Sequence[Passage]) -> float:
    """Return the share of recorded uploads whose topic names the device that sent them."""
    uploads = [(p.client, parse(p.topic)) for p in heard if p.hop is Hop.UP]
    named = [client.endswith(f"-{topic.device}") for client, topic in uploads if topic.kind is TopicKind.UP]
    return float(np.mean(named))


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the share of uploads of which bytes are found, and the adjusted Rand index of groups by model topic."""
    data, truth = _population(lab)
    options = RunOptions("cfl", SPLIT_ONCE, rounds=ROUNDS, mode=mode, local=LOCAL, min_contributors=1, seed=0)
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
        masked = [(upload.round, upload.masked) for upload in uploads]
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


ATTACK: Final = Attack("curious broker", "Danezis and Clayton 2007 (traffic analysis)", WHO, run)
