"""Any interleaving of uploads, copies, forgeries, replays, lost chunks, deadlines and disk errors obeys the upload's rules."""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aggregator.rounds.events import DeadlinePassed
from aggregator.uploads.states import ANSWERED, UploadState
from shoal.errors import ShoalError
from shoal.protocol.messages import Action
from tests.helpers.uploads import DEVICES, Scene, SlowDisk

devices = st.sampled_from(DEVICES)
chunk_sets = st.sets(st.integers(0, 2))
SEALED = {}
"""Sealed uploads by (device, round, variant): seals are random, and slow."""
VARIANTS = {"honest": {}, "second": {"value": 2.0}, "too long": {"value": 50.0}, "miscounted": {"tested": 1}}


class BrokenDisk(SlowDisk):
    """A slow disk that can fail once."""

    fails = False

    def submit(self, job, done):
        """Fail if it should, like an fsync on a failing disk."""
        if self.fails:
            self.fails = False
            raise OSError(5, "Input/output error")
        super().submit(job, done)


class Uploads(RuleBasedStateMachine):
    """Drives the aggregator's uploads and checks each answer at the time that it is given."""

    @initialize()
    def start(self):
        """Open a run."""
        self.directory = Path(tempfile.mkdtemp())
        self.scene = Scene(self.directory, BrokenDisk())
        self.packets, self.answers, self.turn = {}, {}, 0

    def teardown(self):
        """Let every device deliver its upload to the open round, and close the files."""
        if hasattr(self, "scene"):
            self.deliver_all()
            self.scene.close()
            shutil.rmtree(self.directory)

    def packet(self, device, variant="honest"):
        """Return the device's upload to the open round."""
        key = device, self.scene.state.round, variant
        if key not in SEALED:
            signer = next(d for d in DEVICES if d != device) if variant == "forged" else None
            SEALED[key] = self.scene.packet(device, signer=signer, **VARIANTS.get(variant, {}))
        packet = self.packets[device, SEALED[key].transfer] = SEALED[key]
        return packet

    def send(self, packet, *args, **options):
        """Let chunks arrive; return whether they were refused."""
        with suppress(ShoalError):
            self.scene.send(packet, *args, **options)
            return False
        return True

    @rule(device=devices, variant=st.sampled_from([*VARIANTS]), chunks=chunk_sets)
    def chunks_arrive(self, device, variant, chunks):
        """Some chunks of a device's upload arrive; the others are lost."""
        self.send(self.packet(device, variant), chunks)

    @rule(device=devices, variant=st.sampled_from([*VARIANTS]))
    def upload_arrives(self, device, variant):
        """A whole upload arrives, for the first time or again."""
        packet = self.packet(device, variant)
        before = self.scene.state_of(packet)
        refused = self.send(packet)
        if before is not UploadState.RECEIVING:
            assert not refused
            assert self.scene.state_of(packet) is before

    @rule(device=devices)
    def forgery_arrives(self, device):
        """An upload that another device has signed."""
        packet = self.packet(device, "forged")
        assert self.send(packet)
        assert self.scene.state_of(packet) is UploadState.RECEIVING

    @rule(device=devices, data=st.data())
    def replay_arrives(self, device, data):
        """An earlier upload of any device arrives again, on any topic."""
        if self.packets:
            self.send(
                data.draw(st.sampled_from(sorted(self.packets.values(), key=lambda p: p.transfer))), device=device
            )

    @rule(device=devices, variant=st.sampled_from([*VARIANTS]))
    def reminder_arrives(self, device, variant):
        """A device reminds, and the network delivers the requested chunks."""
        self.deliver(self.packet(device, variant))

    def deliver(self, packet):
        """Send a reminder, and the chunks that it makes the aggregator request."""
        self.turn += 1
        before = len(self.scene.publisher.sent)
        self.scene.remind(packet, self.turn)
        for sent in self.scene.publisher.sent[before:]:
            assert sent.device == packet.device
            if sent.action is Action.NACK:
                self.send(packet, sent.missing)

    @rule()
    def commit_starts(self):
        """The driver flushes."""
        self.scene.uploads.flush()

    @rule()
    def disk_finishes(self):
        """The batch under way is durable."""
        self.scene.disk.done()

    @precondition(lambda self: not self.scene.disk.waiting)
    @rule()
    def disk_fails(self):
        """An fsync fails, which ends the aggregator; it is started again."""
        self.scene.disk.fails = True
        try:
            self.scene.uploads.flush()
        except OSError:
            self.restart()
        self.scene.disk.fails = False

    @rule()
    def restart(self):
        """The aggregator is killed and started again."""
        self.check()
        self.answers = {}
        self.scene.restart()

    @rule()
    def deadline_passes(self):
        """The deadline of the open round passes."""
        self.scene.feed(DeadlinePassed(self.scene.state.round))

    @rule(seconds=st.sampled_from([0.5, 5.0, 700.0]))
    def time_passes(self, seconds):
        """Stalled transfers are requested or dropped."""
        self.scene.now_s += seconds
        self.scene.uploads.tick(self.scene.now_s)

    @invariant()
    def check(self):
        """Every answer is true, is about an authentic upload, and never changes."""
        if not hasattr(self, "scene"):
            return
        for sent in self.scene.publisher.take():
            if sent.action is Action.NACK:
                continue
            packet = self.packets[sent.device, sent.transfer]
            assert packet is not SEALED.get((sent.device, packet.header.round, "forged"))
            if sent.action is Action.ACK:
                assert self.scene.durable(packet.header.round)[sent.device] == packet.digest
            before = self.answers.setdefault((sent.device, sent.transfer), (sent.action, sent.reason))
            assert before == (sent.action, sent.reason)
        in_progress = [
            p.device for p in self.packets.values() if self.state_of(p) in {UploadState.VALID, UploadState.COMMITTING}
        ]
        assert len(in_progress) == len(set(in_progress))
        assert bool(in_progress) == self.scene.uploads.committing

    def state_of(self, packet):
        """Return the state of an upload."""
        return self.scene.state_of(packet)

    def deliver_all(self):
        """Without further faults, every upload to the open round is answered, and the first of each device is stored."""
        self.scene.disk.done()
        round_ = self.scene.state.round
        packets = [self.packet(device) for device in DEVICES]
        self.scene.now_s += 1000.0
        for packet in packets:
            self.deliver(packet)
            self.scene.commit()
            self.check()
        assert all(self.state_of(packet) in ANSWERED for packet in packets)
        for packet in packets:
            if self.state_of(packet) is UploadState.ACKNOWLEDGED:
                assert self.scene.durable(round_)[packet.device] == packet.digest


Uploads.TestCase.settings = settings(
    max_examples=settings.default.max_examples // 5,
    stateful_step_count=30,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
test_uploads = Uploads.TestCase
