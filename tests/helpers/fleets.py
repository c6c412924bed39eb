"""Small fleets on the loopback driver, a wiretap on their network, and functions that forge their messages."""

import dataclasses
import functools
import itertools
import json
import math
import os
import tempfile
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path

import numpy as np
from shoal_lab.loopback.fleet import BROKER_URL, LoopbackFleet, draw_origins
from shoal_lab.loopback.transport import Hop
from typer.testing import CliRunner

from aggregator.cli import app
from aggregator.status.live_file import LiveFile
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
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.protocol.topics import Topics
from shoal.simulation.process_fleet import Stage
from shoal.transport.base import Message
from shoal.transport.retained import RetainedPublisher
from shoal.util.files import exclusive
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


def thetas(fleet):
    """Return device -> bytes of the model it ended with."""
    return {name: fleet.model(name).theta.tobytes() for name in fleet.stage.devices}


def events(records, *kinds):
    """Return the events of these kinds in the records, in order."""
    return [e for r in records for e in r["events"] if e["kind"] in kinds]


def restart_aggregator(fleet, steps=0):
    """Kill the aggregator, and start it again after ``steps`` steps of the others."""
    fleet.kill_aggregator()
    for _ in range(steps):
        fleet.step()
    fleet.revive_aggregator()


def restart_device(fleet, name, data=None, steps=0):
    """Kill a device, and start it again after ``steps`` steps of the others; with other data if they are given."""
    fleet.kill_device(name)
    for _ in range(steps):
        fleet.step()
    fleet.revive_device(name, data)


def begin_run(fleet, *, bundle=None, **options):
    """Let the owner sign another run, by default FedAvg of two full-batch rounds, and the aggregator begin it."""
    bundle = bundle or fleet.bundle
    chosen = Recipe("fedavg", **{"rounds": 2, "min_contributors": 1, "seed": 5, "local": FULL_BATCH, **options})
    fleet.stage.add_run(bundle, draw_origins(bundle.manifest, 1, chosen.seed), chosen)
    fleet.serve_newest()


def status_of(fleet, *options):
    """Write the facts of the daemon, and return what ``shoal-aggregator status`` prints beside it; a document for --json."""
    directory = fleet.stage.aggregator_dir
    if fleet.service is not None:
        LiveFile(directory, fleet.service.watch).keep_up(fleet.service.facts, fleet.now_s)
    with nullcontext() if fleet.service is None else exclusive(directory, wait_s=0, hint=""):
        told = CliRunner().invoke(app, ["status", str(directory), *options])
    assert fleet.service is None or told.exit_code == 0, told.output
    return json.loads(told.output)["data"] if options == ("--json",) else told.output


@dataclasses.dataclass
class Rule:
    """Gives ``fate`` to the passages that it concerns, to all or to the first ``left``, and counts them.

    Of their topics it knows the end and a part, of their chunks some fields of the header.
    """

    fate: tuple
    client: str | None = None
    ending: str = ""
    holding: str = ""
    hop: Hop | None = None
    header: dict = dataclasses.field(default_factory=dict)
    left: float = math.inf
    hits: int = 0

    def concerns(self, passage):
        return (
            (self.client is None or passage.client == self.client)
            and passage.topic.endswith(self.ending)
            and self.holding in passage.topic
            and (self.hop is None or passage.hop is self.hop)
            and all(getattr(parse(passage.payload)[0], name) == value for name, value in self.header.items())
        )

    def __call__(self, passage):
        if self.hits >= self.left or not self.concerns(passage):
            return None
        self.hits += 1
        return self.fate


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

    def lose(self, *, times=math.inf, **which):
        """Lose the messages that a `Rule` concerns, all or the first ``times``; return it, to be given to `forgive`."""
        return self.delay(*LOST, times=times, **which)

    def delay(self, *seconds, times=math.inf, **which):
        """Deliver the messages that a `Rule` concerns after so many seconds; return it, as `lose` does."""
        self.rules.append(Rule(seconds, left=times, **which))
        return self.rules[-1]

    def forgive(self, rule):
        self.rules.remove(rule)

    def sent(self, *, hop=Hop.UP, **which):
        return [p for p in self.heard if Rule(CLEAN, hop=hop, **which).concerns(p)]


def slow_link(fleet, client, bytes_per_s, ending=""):
    """Return a wiretap's rule that delivers messages of matching topics from the broker to a client one by one at this rate."""
    free_s, rule = [0.0], Rule(CLEAN, client, ending, hop=Hop.DOWN)

    def slow(passage):
        if not rule.concerns(passage):
            return None
        free_s[0] = max(free_s[0], fleet.now_s) + len(passage.payload) / bytes_per_s
        return (free_s[0] - fleet.now_s,)

    return slow


def all_but_the_first(fleet):
    """Return a wiretap's rule that loses the uploads of all devices but the first that the open round has an order for."""
    uploads = Rule(LOST, ending="/up", hop=Hop.UP)

    def rule(passage):
        first = uploads.concerns(passage) and passage.client == fleet.client_id(
            min(fleet.service.state.plan.assignments)
        )
        return None if first else uploads(passage)

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
