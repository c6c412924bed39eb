"""The aggregator's uploads with a real engine, store and seals, and doubles of the disk's speed and the publisher."""

from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np

from aggregator.inbound import Inbound
from aggregator.rounds.engine import Engine
from aggregator.rounds.snapshot import dump
from aggregator.rounds.state import CameOnline, OpenRound
from aggregator.storage.store import Store
from aggregator.strategies.registry import make_strategy
from aggregator.uploads.uploads import Uploads
from aggregator.workers import RunWorkers
from crypto.seal.envelope import seal_to_member
from shoal.protocol import channels
from shoal.protocol.chunking import ChunkKind, Fingerprint, split
from shoal.protocol.codec import encode
from shoal.protocol.documents import Roster, SegmentSpec
from shoal.protocol.messages import Action, Reminder
from tests.helpers.plans import run_plan, upload_of
from tests.helpers.statements import identity

STRANGER = "stranger"
DEVICES = ("dev-1", "dev-2", "dev-3")
LENGTH = 600
CHUNK_BYTES = 1024


class Membership:
    """A roster that lists every device but STRANGER."""

    def __init__(self):
        self.roster = SimpleNamespace(device=lambda name: None if name == STRANGER else SimpleNamespace(name=name))


@dataclass(frozen=True)
class Sent:
    """A message to a device: an answer, or a request for chunks."""

    device: str
    transfer: bytes
    action: Action
    reason: str = ""
    missing: tuple[int, ...] = ()


class Recorder:
    """A publisher that records its calls."""

    def __init__(self):
        self.sent = []

    def answer(self, member, _run, _round, transfer, action, reason="", missing=()):
        """Record an answer, or a request for chunks."""
        reason = "" if action is Action.NACK else reason  # the same for all requests
        self.sent.append(Sent(member.name, transfer, action, reason, missing))

    def take(self):
        """Return the messages since the last time."""
        sent, self.sent = self.sent, []
        return sent


class SlowDisk:
    """A disk whose job ends when the test says so; uploads that arrive meanwhile wait for the next batch."""

    def __init__(self):
        self.waiting = []

    def submit(self, job, done, **_options):
        """Run ``job`` at once, and ``done`` later."""
        result = job()
        self.waiting.append(lambda: done(result))

    def done(self):
        """Finish the job that is under way, if there is one."""
        waiting, self.waiting = self.waiting, []
        for finish in waiting:
            finish()

    def close(self):
        """Do nothing: there is no thread."""


class SlowWorkers:
    """Workers whose jobs run, and call back, when the test says so: those of one key in order, others in any order."""

    def __init__(self):
        self.jobs, self.results = {}, {}

    def submit(self, job, done=None, *, key="", **_options):
        """Hold ``job``."""
        self.jobs.setdefault(key, []).append((job, done))

    def run(self, key):
        """Run the oldest job of a key."""
        job, done = self._oldest(self.jobs, key)
        result = job()
        if done is not None:
            self.results.setdefault(key, []).append(lambda: done(result))

    def call_back(self, key):
        """Hand the oldest result of a key to the driver."""
        self._oldest(self.results, key)()

    def _oldest(self, held, key):
        oldest = held[key].pop(0)
        if not held[key]:
            del held[key]
        return oldest

    def finish(self):
        """Run all jobs and hand over all results."""
        while self.jobs or self.results:
            for key in list(self.jobs):
                self.run(key)
            for key in list(self.results):
                self.call_back(key)

    def close(self):
        """Drop what has not been handed over."""
        self.jobs, self.results = {}, {}


@dataclass(frozen=True)
class Packet:
    """A sealed upload."""

    device: str
    sealed: bytes
    header: object

    @property
    def chunks(self):
        """The upload in chunks."""
        return split(self.sealed, kind=ChunkKind.UPLOAD, round=self.header.round, chunk_bytes=CHUNK_BYTES)

    @property
    def transfer(self):
        """The upload's transfer id."""
        return Fingerprint.of(self.sealed).transfer_id

    @property
    def digest(self):
        """The hash that the device signed."""
        return Fingerprint.of(self.sealed).signed


class Scene:
    """One run of DEVICES and its uploads, with a round open.

    The engine's state survives `restart` as a snapshot would keep it; the uploads only survive in the store.
    """

    def __init__(self, directory, disk=None, intake=None):
        self.run = run_plan(segments=(SegmentSpec("cluster", LENGTH),), rounds=1000)
        server = identity("aggregator")
        roster = Roster(
            fleet="demo",
            sequence=3,
            issued_at_s=0,
            expires_at_s=1,
            aggregator=server.member,
            devices=tuple(identity(d).member for d in DEVICES),
            revoked=(),
        )
        self.membership = SimpleNamespace(identity=server, roster=roster)
        self.engine = Engine(self.run, make_strategy(self.run), bytes(16))
        self.disk = disk or SlowDisk()
        self.workers = RunWorkers(self.disk, intake) if intake else RunWorkers(self.disk)
        self.refused = []
        self.publisher = Recorder()
        self.now_s = 0.0
        self.store = Store(directory / "run", self.run, lambda: bytes(16))
        self.state, _ = self.engine.begin(DEVICES)
        self._build()
        for device in DEVICES:
            self._handle(CameOnline(device))

    def _build(self):
        self._events = []
        self.computing = False
        self._inbound = Inbound(self.membership, self.engine, self.store.directory)
        self.uploads = Uploads(
            self.run,
            self.membership,
            engine=self.engine,
            driver=self,
            inbound=self._inbound,
            store=self.store,
            workers=self.workers,
            publisher=self.publisher,
        )

    def restart(self):
        """Lose everything that is not durable."""
        directory = self.store.directory
        self.close()
        self.disk.waiting.clear()
        self.workers.intake.close()
        self.store = Store(directory, self.run)
        self.state, _ = self.engine.resume(
            DEVICES, self._opened.before, self._opened.held, self._opened.plan.round, self._opened.available
        )
        self._build()
        stored = self.store.uploads(self.state.round)
        if stored:
            self.on_committed(stored)

    def snapshot(self):
        """Store the open round, which retires the files of earlier ones."""
        opened = self._opened
        encoded = dump(opened.before, opened.held)
        self.store.snapshot(opened.plan.round, opened.available, encoded, self.state.resume_metadata)

    def close(self):
        """Close the files."""
        self._inbound.close()
        self.store.close()

    def _handle(self, *events):
        before = self.state
        self.state, actions = self.engine.advance(before, self.engine.record(before, events))
        for action in actions:
            if isinstance(action, OpenRound):
                self._opened = action

    def feed(self, event):
        """See `aggregator.uploads.uploads.EngineDriver`."""
        self._events.append((self.uploads.newest, event))
        self.on_progress()

    def on_progress(self):
        """See `aggregator.uploads.uploads.EngineDriver`."""
        while self._events and not self.uploads.holds_back(self._events[0][0]):
            self._handle(self._events.pop(0)[1])

    def on_committed(self, stored):
        """See `aggregator.uploads.uploads.EngineDriver`."""
        self._handle(*stored)

    def on_refused(self, device, error):
        """See `aggregator.uploads.uploads.EngineDriver`."""
        self.refused.append((device, error))

    def take_refused(self):
        """Return the errors reported since the last time."""
        refused, self.refused = self.refused, []
        return [error for _, error in refused]

    def packet(self, device, value=1.0, signer=None, **changes):
        """Return an upload for the open round whose coordinates are all ``value``."""
        server = self.membership.identity.member
        values = np.full(LENGTH, value)
        header, body = upload_of(self.engine, self.state, device, values=values, recipient=server.seal_key, **changes)
        head = channels.UPLOAD.head("demo", device, "aggregator")
        sealed = seal_to_member(identity(signer or device), server.seal_key, head, encode(header), body)
        return Packet(device, sealed, header)

    def send(self, packet, indices=None, device=None):
        """Let chunks of an upload arrive, all of them by default, on its device's topic or that of ``device``."""
        for index, chunk in enumerate(packet.chunks):
            if indices is None or index in indices:
                self.uploads.receive(device or packet.device, chunk, self.now_s)

    def send_all(self, *packets):
        """Let all chunks of these uploads arrive."""
        for packet in packets:
            self.send(packet)

    def remind(self, packet, turn=1):
        """Let a reminder of an upload arrive, a second after the latest message."""
        self.now_s += 1.0
        reminder = Reminder(
            fleet="demo",
            device=packet.device,
            run_id=self.run.run_id,
            round=packet.header.round,
            transfer=packet.transfer,
            digest=packet.digest,
            size=len(packet.sealed),
            chunk_bytes=CHUNK_BYTES,
            turn=turn,
        )
        server = self.membership.identity.member
        head = channels.REMINDER.head("demo", packet.device, "aggregator")
        sealed = seal_to_member(identity(packet.device), server.seal_key, head, encode(reminder), b"")
        (chunk,) = split(sealed, kind=ChunkKind.REMINDER, round=packet.header.round)
        self.uploads.receive(packet.device, chunk, self.now_s)

    def commit(self):
        """Commit every valid upload."""
        self.uploads.flush()
        while self.disk.waiting:
            self.disk.done()

    def state_of(self, packet):
        """Return the state of an upload."""
        return self.uploads.state(packet.device, packet.transfer)

    def durable(self, round_):
        """Return device -> digest of the uploads of a round that are in the store."""
        return {c.device: c.digest for c in self.store.uploads(round_)}
