"""A run service with two devices, on a line that records what it publishes."""

from contextlib import closing
from dataclasses import dataclass

import numpy as np

from aggregator.run_service import RunService
from aggregator.storage.store import Store, read_plan, read_records
from aggregator.workers import RunWorkers
from crypto.seal.envelope import open_from_group, read_head, seal_to_member
from edge_client.protocol.presence import presence
from shoal.protocol import channels
from shoal.protocol.chunking import ChunkKind, Fingerprint, split
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPackage, RunPlan
from shoal.protocol.messages import Control, Reminder
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.topics import TopicKind
from shoal.transport.base import Message
from tests.helpers.parties import TOPICS, Line, Parties, owners_roster
from tests.helpers.plans import run_plan, upload_of
from tests.helpers.uploads import SlowDisk

PACKAGE = encode(RunPackage(b"plan", b"task", b"origins"))
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Uploaded:
    """An upload as a device has sealed it."""

    sealed: bytes
    round: int

    @property
    def transfer(self):
        """The upload's transfer id."""
        return Fingerprint.of(self.sealed).transfer_id


class Scene:
    """A service with two devices; ``order`` has snapshots and announcements as they are made."""

    def __init__(self, root, workers=None, **plan):
        self.parties = Parties(root, "dev-1", "dev-2")
        roster = self.parties.owner.roster
        fields = {"rounds": 3, "quorum": 0.5, "deadline_s": DEADLINE_S, **plan}
        self.plan = run_plan(fleet="reef", roster_sequence=roster.sequence, **fields)
        self.line, self.disk, self.order, self.now_s = Line(), SlowDisk(), [], 0.0
        self.births = 1
        self.run_workers = workers or self.workers()
        publish = self.line.publish

        def announce(topic, payload, *, retain=False, qos=1):
            if topic.startswith(TOPICS.round):
                self.order.append("announce")
            publish(topic, payload, retain=retain, qos=qos)

        self.line.publish = announce
        self.service = self.make()
        self.service.start(0.0)

    def workers(self):
        """Return the run's workers: a disk that ends when the test says so."""
        return RunWorkers(self.disk)

    def make(self):
        """Return a service on the scene's directory."""
        order = self.order

        class Watched(Store):
            def snapshot(self, *arguments, **options):
                order.append("snapshot")
                super().snapshot(*arguments, **options)

        server = self.parties.server
        return RunService(
            server,
            self.plan,
            PACKAGE,
            self.line,
            server.directory,
            workers=self.run_workers,
            store_factory=Watched,
        )

    @property
    def state(self):
        return self.service.state

    def come(self, *devices, online=True):
        """Let devices come online, or go offline."""
        for device in devices:
            self.births += not online
            topic, chunk = presence(self.parties.members[device], self.births, online=online)
            self.service.on_event(Message(topic, chunk), self.now_s)

    def upload(self, *devices, commit=True, value=1.0):
        """Let devices upload to the open round; return their uploads."""
        server = self.parties.server.identity.member
        sent = {}
        for device in devices:
            signer = self.parties.members[device].identity
            values = np.full(self.plan.length, value)
            header, body = upload_of(
                self.service._engine, self.state, device, values=values, recipient=server.seal_key, signer=signer
            )
            sealed = self._sealed(device, channels.UPLOAD, header, body)
            sent[device] = Uploaded(sealed, header.round)
            self.send_again(device, sent[device])
        self.service.flush(self.now_s)
        if commit:
            self.disk.done()
        return sent

    def send_again(self, device, upload):
        """Let an upload arrive."""
        (chunk,) = split(upload.sealed, kind=ChunkKind.UPLOAD, round=upload.round)
        self.service.on_event(Message(TOPICS.up(device), chunk), self.now_s)

    def remind(self, device, upload):
        """Let a device remind of its upload."""
        reminder = Reminder(
            fleet="reef",
            device=device,
            run_id=self.plan.run_id,
            round=upload.round,
            transfer=upload.transfer,
            digest=Fingerprint.of(upload.sealed).signed,
            size=len(upload.sealed),
            chunk_bytes=1 << 16,
            turn=1,
        )
        sealed = self._sealed(device, channels.REMINDER, reminder)
        (chunk,) = split(sealed, kind=ChunkKind.REMINDER, round=upload.round)
        self.service.on_event(Message(TOPICS.up(device), chunk), self.now_s)

    def _sealed(self, device, channel, message, body=b""):
        server = self.parties.server.identity.member
        head = channel.head("reef", device, "aggregator")
        return seal_to_member(self.parties.members[device].identity, server.seal_key, head, encode(message), body)

    def revoke(self, device):
        """Let the owner revoke a device, and the roster arrive."""
        self.parties.owner.revoke(device)
        self.service.on_event(Message(TOPICS.at(TopicKind.OWNER_ROSTER), owners_roster(self.parties)), self.now_s)

    def controls(self):
        """Return the messages to single devices since the last time."""
        sent, self.line.sent = self.line.sent, []
        server = self.parties.server
        found = []
        for topic, payload, _ in sent:
            if TOPICS.parse(topic).device and topic.endswith("/ctl"):
                sealed = Reassembler().add("x", payload, 0.0).payload
                head, at = read_head(sealed)
                if head.purpose == channels.CONTROL.purpose:
                    plain = open_from_group(server.group, sealed, head, at, server.identity.member.sign_key)
                    found.append(decode(plain, Control))
        return found

    def finish(self):
        """Do all rounds of the run."""
        self.come("dev-1", "dev-2")
        while not self.service.finished:
            self.upload(*self.state.waiting)

    @property
    def run_directory(self):
        return self.parties.server.directory / "run-000001"

    def records(self):
        return read_records(self.run_directory)


def newest_snapshot(directory):
    """Return the newest snapshot of a run: its round, its document, and the bytes of its vectors by name."""
    with closing(Store(directory, decode(read_plan(directory), RunPlan))) as store:
        found = store.restore()
    return found.round, found.document, {name: vector.tobytes() for name, vector in found.vectors.items()}
