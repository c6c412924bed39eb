"""Any interleaving of uploads, copies, forgeries, replays, lost chunks, workers, deadlines and disk errors obeys the rules.

The intake's workers are in turn the caller's thread and workers that run, and call back, whenever hypothesis likes.
"""

import shutil
import tempfile
from contextlib import suppress
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from aggregator.rounds.state import DeadlinePassed
from aggregator.uploads.states import ANSWERED, UploadState
from shoal.errors import ShoalError
from shoal.protocol.messages import Action
from tests.helpers.uploads import DEVICES, Scene, SlowDisk, SlowWorkers

devices = st.sampled_from(DEVICES)
chunk_sets = st.sets(st.integers(0, 2))
SEALED = {}
"""Sealed uploads by (device, round, variant): seals are random, and slow."""
VARIANTS = {"honest": {}, "second": {"value": 2.0}, "too long": {"value": 50.0}, "miscounted": {"tested": 1}}
IN_ORDER = ("honest", "second")
"""Variants that break no rule: of those of one device, the first that is complete counts."""


class BrokenDisk(SlowDisk):
    """A slow disk that can fail once."""

    fails = False

    def submit(self, job, done, **options):
        """Fail if it should, like an fsync on a failing disk."""
        if self.fails:
            self.fails = False
            raise OSError(5, "Input/output error")
        super().submit(job, done, **options)


class Uploads(RuleBasedStateMachine):
    """Drives the aggregator's uploads and checks each answer at the time that it is given."""

    @initialize(slow=st.booleans())
    def start(self, slow):
        """Open a run."""
        self.directory = Path(tempfile.mkdtemp())
        self.intake = SlowWorkers()
        self.scene = Scene(self.directory, BrokenDisk(), self.intake if slow else None)
        self.packets, self.answers, self.turn, self.first = {}, {}, 0, {}

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
        """Let chunks arrive, and remember which upload of a device was complete first; return whether a chunk was refused."""
        before = self.state_of(packet)
        with suppress(ShoalError):
            self.scene.send(packet, *args, **options)
            in_order = packet in [SEALED.get((packet.device, packet.header.round, v)) for v in IN_ORDER]
            if in_order and before is UploadState.RECEIVING is not self.state_of(packet):
                self.first.setdefault((packet.device, packet.header.round), packet.transfer)
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
        assert not self.send(packet)
        if before is not UploadState.RECEIVING:
            assert self.scene.state_of(packet) is before

    @rule(device=devices)
    def forgery_arrives(self, device):
        """An upload that another device has signed."""
        packet = self.packet(device, "forged")
        self.send(packet)
        assert self.scene.state_of(packet) in {UploadState.RECEIVING, UploadState.VERIFYING}

    @precondition(lambda self: self.intake.jobs)
    @rule(data=st.data())
    def worker_runs(self, data):
        """A worker verifies, opens and writes the oldest upload of a device."""
        self.intake.run(data.draw(st.sampled_from(sorted(self.intake.jobs))))

    @precondition(lambda self: self.intake.results)
    @rule(data=st.data())
    def worker_calls_back(self, data):
        """The driver hears of the oldest upload of a device that workers have done."""
        self.intake.call_back(data.draw(st.sampled_from(sorted(self.intake.results))))

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
        # What was not durable is lost: the next one that is complete is the first.
        self.first = {}
        for (device, transfer), packet in self.packets.items():
            if self.scene.state.received.get(device, (0, b""))[1] == packet.digest:
                self.first[device, packet.header.round] = transfer

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
                assert self.first[sent.device, packet.header.round] == sent.transfer
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
        self.intake.finish()
        self.scene.commit()
        self.check()
        round_ = self.scene.state.round
        packets = [self.packet(device) for device in DEVICES]
        self.scene.now_s += 1000.0
        for packet in packets:
            self.deliver(packet)
            self.intake.finish()
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
