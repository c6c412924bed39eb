"""One worker: which parts it takes and reports, which orders it follows, and its answers to jobs."""

import dataclasses
import hashlib

import numpy as np
import pytest

from aggregator.shards.worker import WorkerService
from crypto.seal.envelope import seal_message_to_member
from shoal.errors import UntrustedError
from shoal.protocol import channels
from shoal.protocol.chunking import split
from shoal.protocol.codec import encode
from shoal.protocol.jobs import Job, JobKind, MeanPlace, NodeKind, VectorNode
from shoal.protocol.messages import Phase, Reminder
from shoal.protocol.shards import UploadPart, borders
from shoal.protocol.topics import TopicKind
from shoal.transport.base import Message
from tests.helpers.parties import TOPICS, Line
from tests.unit.aggregator.shards.test_coordinator import NAMES, Scene

NUMBER = 1


class WorkerScene(Scene):
    """The coordinator of a scene, and its worker 1 at work."""

    def __init__(self, root):
        super().__init__(root)
        self.directory, self.out, self.asked = root / NAMES[NUMBER], Line(), []
        self.length = int(np.diff(borders(self.run.length, len(NAMES))[NUMBER])[0])
        self.worker = self.start()

    def start(self, birth=1):
        worker = WorkerService(self.workers[NUMBER], self.run, self.out, self.directory, birth=birth)
        worker.start(0.0)
        return worker

    def deliver(self):
        """Hand the worker what the coordinator sent it, and the coordinator what the worker reported."""
        sent, self.line.sent = self.line.sent, []
        for topic, payload, _ in sent:
            if topic == TOPICS.at(TopicKind.JOB, NAMES[NUMBER]):
                self.worker.on_event(Message(topic, payload), 0.0)
        self.worker.flush(0.0)
        told, self.out.sent = self.out.sent, []
        for topic, payload, _ in told:
            if topic == TOPICS.at(TopicKind.PART_CTL, "dev-1"):
                self.asked.append(payload)
            if topic in (TOPICS.at(kind, NAMES[NUMBER]) for kind in (TopicKind.REPORT, TopicKind.WORKER_STATE)):
                self.take(topic, payload)

    def upload(self, values, device="dev-1", round_=1, **changes):
        """Send a device's part to the worker, and return the sealed message."""
        header = UploadPart(
            fleet="reef",
            run_id=self.run.run_id,
            round=round_,
            phase=Phase.TRAIN,
            nonce=bytes(16),
            device=device,
            recipient=self.workers[NUMBER].identity.member.seal_key,
            worker=NUMBER,
        )
        message = encode(dataclasses.replace(header, **changes))
        return self.seal(device, channels.PART, message, np.asarray(values, "<f4").tobytes(), round_)

    def seal(self, device, channel, message, body=b"", round_=1):
        """Seal a device's message to the worker, send it, and return it."""
        identity, receiver = self.members[device].identity, self.workers[NUMBER].identity.member
        head = channel.head("reef", device, receiver.name)
        parcel = seal_message_to_member(identity, receiver.seal_key, head, message, body)
        self.send(parcel, device, round_, channel)
        return parcel

    def send(self, parcel, device="dev-1", round_=1, channel=channels.PART):
        """Send a sealed message of a device to the worker."""
        for chunk in split(
            parcel.payload, kind=channel.kind, round=round_, chunk_bytes=1 << 16, name=parcel.transfer_id
        ):
            self.worker.on_event(Message(TOPICS.part(device, NUMBER), chunk), 0.0)
        self.deliver()

    def remind(self, about, device="dev-1"):
        """Send a device's reminder of a part, and return what the worker asks the device for."""
        reminder = Reminder(
            fleet="reef",
            device=device,
            run_id=self.run.run_id,
            round=1,
            transfer=about.transfer_id,
            digest=about.signed,
            size=len(about.payload),
            chunk_bytes=1 << 16,
            turn=1,
        )
        self.asked = []
        self.seal(device, channels.PART_REMINDER, encode(reminder))
        return self.asked

    def means(self, *digests, number=1):
        """Return a job that asks for the mean of the parts of dev-1, dev-2 and so on."""
        names = tuple(f"dev-{place + 1}" for place in range(len(digests)))
        updates = tuple(VectorNode(NodeKind.UPDATE, (place,)) for place in range(len(digests)))
        mean = VectorNode(NodeKind.MEAN, tuple(range(len(digests))), (1.0,) * len(digests))
        return Job(
            run_id=self.run.run_id,
            number=number,
            kind=JobKind.MEANS,
            round=1,
            generation="",
            devices=names,
            digests=digests,
            nodes=(*updates, mean),
            vectors=(len(digests),),
            means=(MeanPlace(0, ""),),
        )


@pytest.fixture
def scene(tmp_path):
    made = WorkerScene(tmp_path)
    made.order()
    made.deliver()
    yield made
    made.worker.close()


def test_durable_part_is_reported_again(scene):
    """A part is reported once it is durable and again when it comes again."""
    assert scene.messages.absent == ("worker-0",)
    values = np.arange(scene.length)
    sealed = scene.upload(values)
    (report,) = scene.reports
    (part,) = report.parts
    assert (report.round, part.device, part.digest) == (1, "dev-1", sealed.signed)
    assert part.squared_norm == float(values @ values)
    scene.send(sealed)
    assert scene.reports == [report, report]


def test_reminder_has_a_part_reported(scene):
    """A reminder has a stored part reported again and one of another part has it asked for."""
    stored, other = scene.upload([1.0] * scene.length), scene.upload([2.0] * scene.length, "dev-2")
    scene.reports.clear()
    assert scene.remind(stored) == []
    assert [part.digest for report in scene.reports for part in report.parts] == [stored.signed]
    scene.reports.clear()
    assert len(scene.remind(other)) == 1
    assert scene.reports == []


@pytest.mark.parametrize(
    ("value", "changes", "reason"),
    [
        (1.0, {"round_": 2}, "for round 2, which is not open for it"),
        (1.0, {"nonce": b"x" * 16}, "for round 1, which is not open for it"),
        (1.0, {"worker": 0}, "another run or worker"),
        (1.0, {"run_id": b"x" * 16}, "another run or worker"),
        (np.nan, {}, "holds NaN or infinities"),
        (1.0, {"count": 1}, "a part of 4 bytes"),
    ],
)
def test_unordered_part_is_not_taken(scene, caplog, value, changes, reason):
    """A part that no order allows or that is malformed is not taken."""
    count = changes.get("count", scene.length)
    scene.upload([value] * count, **{name: given for name, given in changes.items() if name != "count"})
    assert scene.reports == []
    (record,) = caplog.records
    assert reason in str(record.kv["reason"])


def test_job_names_devices_without_parts(scene):
    """A job without its parts names the devices and one with them stores the mean."""
    one, two = (
        scene.upload([value] * scene.length, device).signed for value, device in ((1.0, "dev-1"), (3.0, "dev-2"))
    )
    scene.messages.job(NUMBER, scene.means(one, bytes(32), number=1))
    scene.messages.job(NUMBER, scene.means(one, two, number=2))
    scene.deliver()
    lacking, done = scene.answers
    assert (lacking.number, lacking.lacking, lacking.digests) == (1, ("dev-2",), ())
    expected = np.full(scene.length, 2.0, "<f4").tobytes()
    assert (done.number, done.lacking, done.digests) == (2, (), (hashlib.sha256(expected).digest(),))


def test_order_survives_a_restart(scene):
    """An order survives a restart and an older one has no effect."""
    first = scene.messages._order(NUMBER)
    scene.order(round_=2)
    scene.deliver()
    scene.worker.take_order(first)
    scene.worker.close()
    scene.worker = scene.start(birth=2)
    assert not scene.worker.finished
    scene.upload([1.0] * scene.length, round_=2)
    assert [report.round for report in scene.reports] == [2]


def test_unnamed_worker_serves_no_run(scene, tmp_path):
    """A worker that the plan does not name serves no run."""
    renewed = dataclasses.replace(scene.run.workers[NUMBER], seal_key=b"x" * 32)
    other = dataclasses.replace(scene.run, workers=(scene.run.workers[0], renewed))
    with pytest.raises(UntrustedError, match="has no worker 'worker-1' with these keys"):
        WorkerService(scene.workers[NUMBER], other, Line(), tmp_path, birth=1)
