"""Small fleets on the loopback driver, a wiretap on their network, and functions that forge their messages."""

import dataclasses
import functools
import itertools
import os
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from shoal_lab.loopback.fleet import BROKER_URL, LoopbackFleet
from shoal_lab.loopback.transport import Hop

from crypto.seal.envelope import GroupKey, open_from_group, open_from_member, read_head, seal_to_group, seal_to_member
from crypto.seal.identity import Identity
from edge_client.learning.data import Dataset
from shoal import limits
from shoal.membership.directory import KEY_FILE
from shoal.protocol import channels
from shoal.protocol.chunking import ChunkKind, parse, split
from shoal.protocol.codec import decode, encode
from shoal.protocol.messages import Announcement, Control, Sealed, Upload
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.recipe import LocalTraining
from shoal.protocol.topics import Topics
from shoal.simulation.process_fleet import Stage
from shoal.transport.base import Message
from shoal.transport.retained import RetainedPublisher
from tests.helpers.plans import a_recipe
from tests.helpers.tasks import logistic_bundle

SHARDS = int(os.environ.get("SHOAL_SHARDS", "1"))
"""Workers of the fleets' aggregator, unless a test gives their number; 1 is an aggregator without workers."""
INPUTS, CLASSES = (6 if SHARDS == 1 else 12), 4
FULL_BATCH = LocalTraining(epochs=0, steps=4, batch_size=0, lr=0.8)
CLEAN = (0.0,)
LOST = ()


def names(count):
    return tuple(f"dev-{i:02d}" for i in range(count))


def grouped_data(count, groups=1, n=60, inputs=INPUTS, classes=CLASSES, seed=0):
    """Return device -> Batch: one linear concept, whose labels group g rotates by g (cfl section VI, label permutation)."""
    rng = np.random.default_rng(seed)
    concept = rng.standard_normal((inputs, classes)) * 2
    data = {}
    for i, name in enumerate(names(count)):
        x = rng.standard_normal((n, inputs)).astype(np.float32)
        data[name] = Dataset(x, ((x @ concept).argmax(1) + i % groups).astype(np.int64) % classes)
    return data


def finish_of(fleet, name):
    """Let a device do the personal finish that is due; return whether there was one. A fleet's `step` does none."""
    device = fleet.devices[name]
    device.runtime.tick(fleet.now_s)
    return device.finish_worker.work()


def truth_of(count, groups):
    return {name: i % groups for i, name in enumerate(names(count))}


def same_partition(clusters, truth):
    """Whether two maps device -> group part the same devices in the same way."""
    sets = [defaultdict(set), defaultdict(set)]
    for found, labels in zip(sets, (clusters, truth), strict=True):
        for device, label in labels.items():
            found[label].add(device)
    return {frozenset(s) for s in sets[0].values()} == {frozenset(s) for s in sets[1].values()}


_FOUNDED = tempfile.TemporaryDirectory(dir=os.environ.get("PYTEST_DEBUG_TEMPROOT"))
_TURNS = itertools.count()


@functools.cache
def _founded(devices, shards, number):
    """Return the directories of a fleet of these devices that has no run yet. Tests work on copies of them."""
    return Stage(Path(tempfile.mkdtemp(f"-{number}", dir=_FOUNDED.name)), BROKER_URL, devices, shards=shards)


def founded(root, devices, shards=1):
    """Return the directories of a fleet without runs, copied to ``root``, which may exist as an empty directory.

    Making keys takes as long as a short run does, so fleets of the same devices take turns with two sets of keys.
    """
    if root.exists():
        root.rmdir()
    return _founded(devices, shards, next(_TURNS) % 2).copy_to(root)


def make_fleet(
    root,
    data=None,
    *,
    bundle=None,
    faults=None,
    count=3,
    executors=None,
    trainers=None,
    backend=None,
    shards=None,
    stage=None,
    origins=None,
    schedule=None,
    **options,
):
    """Return a loopback fleet of a small logistic task; full-batch FedAvg of three rounds unless ``options`` differ.

    Its aggregator has ``shards`` workers, by default SHARDS. Its directories are ``stage``, or are `founded`.
    """
    settings = {"algorithm": "fedavg", "rounds": 3, "local": FULL_BATCH, "seed": 1, "min_contributors": 1, **options}
    data = grouped_data(count) if data is None else data
    task, chosen = bundle or logistic_bundle(INPUTS, CLASSES), a_recipe(**settings)
    stage = stage or founded(root, tuple(sorted(data)), shards or SHARDS)
    devices = {"executors": executors, "trainers": trainers}
    devices |= {"origins": origins, "schedule": schedule}
    return LoopbackFleet(root, task, data, chosen, faults, backend=backend, stage=stage, **devices)


def make_exact_fleet(root, data=None, **options):
    """Return a fleet as `make_fleet` does, whose mask rounds nothing: its models equal those of its like bit for bit."""
    return make_fleet(root, data, **{"mode": "permutation", **options})


def publish(fleet):
    """Let the owner connect, read the retained messages, and publish roster and keys."""
    fleet.publish()


def thetas(fleet):
    """Return device -> bytes of the model it ended with."""
    return {name: fleet.model(name).theta.tobytes() for name in fleet.stage.devices}


class Wiretap:
    """Faults by a list of functions passage -> fate or None, tried in order; remembers every passage.

    ``heard`` holds (hop, client, topic, payload) of every message sent, also of lost ones.
    """

    def __init__(self):
        self.heard = []
        self.rules = []

    def __call__(self, passage):
        self.heard.append(passage)
        for rule in self.rules:
            fate = rule(passage)
            if fate is not None:
                return fate
        return CLEAN

    def lose(self, *, client=None, ending="", hop=None, chunk=None, times=None):
        """Lose matching messages, all or the first ``times``; return the rule, to be given to `forgive`."""
        left = [times]

        def rule(passage):
            if not concerns(passage, client, ending, hop) or left[0] == 0:
                return None
            if chunk is not None and parse(passage.payload)[0].index != chunk:
                return None
            if left[0] is not None:
                left[0] -= 1
            return LOST

        self.rules.append(rule)
        return rule

    def forgive(self, rule):
        self.rules.remove(rule)

    def sent(self, *, client=None, ending="", hop=Hop.UP):
        return [p for p in self.heard if concerns(p, client, ending, hop)]


def concerns(passage, client, ending, hop):
    return (
        (client is None or passage.client == client)
        and passage.topic.endswith(ending)
        and (hop is None or passage.hop is hop)
    )


def slow_link(fleet, client, bytes_per_s, ending=""):
    """Return a wiretap's rule that delivers messages of matching topics from the broker to a client one by one at this rate."""
    free_s = [0.0]

    def rule(passage):
        if not concerns(passage, client, ending, Hop.DOWN):
            return None
        free_s[0] = max(free_s[0], fleet.now_s) + len(passage.payload) / bytes_per_s
        return (free_s[0] - fleet.now_s,)

    return rule


def whole(chunks, source="x"):
    """Return the payloads of the transfers that the chunks complete, in order."""
    reassembler = Reassembler()
    done = (reassembler.add(source, chunk, 0.0) for chunk in chunks)
    return [bytes(t.payload) for t in done if t is not None]


def uploads_of(fleet, tap, name):
    """Return the sealed uploads that a device has sent, in order."""
    chunks = [p.payload for p in tap.sent(client=fleet.client_id(name), ending="/up")]
    return whole([c for c in chunks if parse(c)[0].kind is ChunkKind.UPLOAD])


def aggregator_identity(fleet):
    return Identity.load(fleet.stage.aggregator_dir / KEY_FILE)


def group_key(fleet):
    """Return the key that devices and aggregator share."""
    return GroupKey(fleet.plan.fleet, "broadcast", fleet.stage.fleet.secrets.broadcast_key)


def device_identity(fleet, name):
    return Identity.load(fleet.stage.device_dir(name) / KEY_FILE)


def open_upload(fleet, name, sealed):
    """Return (Upload, body) of a sealed upload, as the aggregator reads it."""
    head, at = read_head(sealed)
    signed, body = open_from_member(
        aggregator_identity(fleet), sealed, head, at, device_identity(fleet, name).member.sign_key
    )
    return decode(signed, Upload), bytes(body)


def seal_upload(fleet, name, upload, body, *, signer=None, head=None, recipient=None):
    """Return an upload sealed as the device does; every part may be another."""
    head = head or channels.UPLOAD.head(fleet.plan.fleet, name, "aggregator")
    to = recipient or aggregator_identity(fleet).member
    return seal_to_member(signer or device_identity(fleet, name), to.seal_key, head, encode(upload), body)


def with_body(upload, values):
    """Return the upload and its body for another vector (d,) float32, without what was attached."""
    body = np.ascontiguousarray(values, "<f4").tobytes()
    return dataclasses.replace(upload, length=len(body) // 4, attached=0), body


def inject(fleet, name, sealed, *, topic_of=None):
    """Publish a sealed upload on a device's topic, as any client of the broker could."""
    topic = Topics(fleet.plan.fleet).up(topic_of or name)
    for chunk in split(sealed, kind=ChunkKind.UPLOAD, round=1):
        fleet.broker.submit("attacker", Message(topic, chunk), lambda: None)


def answers(fleet, tap, name):
    """Return the Control messages that the aggregator sent to a device, in order."""
    found = []
    for sealed in whole([p.payload for p in tap.sent(ending=f"/{name}/ctl")]):
        head, at = read_head(sealed)
        plain = open_from_group(group_key(fleet), sealed, head, at, aggregator_identity(fleet).member.sign_key)
        assert (head.purpose, head.recipient) == ("control", name)
        found.append(decode(plain, Control))
    return found


def announcements(fleet, tap):
    """Return the announcements that were published, in order."""
    found = []
    for sealed in whole([p.payload for p in tap.sent(ending="/s/round")]):
        head, at = read_head(sealed)
        found.append(
            decode(
                open_from_group(group_key(fleet), sealed, head, at, aggregator_identity(fleet).member.sign_key),
                Announcement,
            )
        )
    return found


class _ToBroker:
    """Just enough of a transport for a publisher that writes to the broker under the aggregator's client id."""

    chunk_bytes = limits.CHUNK_BYTES

    def __init__(self, fleet):
        self.fleet = fleet

    together = staticmethod(nullcontext)

    def publish(self, topic, payload, *, retain=False, qos=1):
        message = Message(topic, bytes(payload), retained=retain)
        self.fleet.broker.submit(self.fleet.client_id("aggregator"), message, lambda: None, qos)


def tell(fleet, base, purpose, plain, kind, *, round_=0, signer=None):
    """Publish ``plain`` to the fleet as a rogue aggregator can: with its own key, or another's; return the transfer id."""
    head = Sealed(fleet.plan.fleet, purpose, "aggregator", "*")
    sealed = seal_to_group(signer or aggregator_identity(fleet), group_key(fleet), head, plain)
    return RetainedPublisher(_ToBroker(fleet)).publish(base, sealed, kind=kind, round_=round_)


def announce(fleet, announcement, *, signer=None, purpose="announcement"):
    """Publish an announcement as `tell` does."""
    topic = Topics(fleet.plan.fleet).round
    plain = encode(announcement)
    return tell(fleet, topic, purpose, plain, ChunkKind.ROUND, round_=announcement.round, signer=signer)


def reasons(caplog):
    """Return why messages were refused, from the log of both sides."""
    return [str(r.kv["reason"]) for r in caplog.records if "reason" in getattr(r, "kv", {})]
