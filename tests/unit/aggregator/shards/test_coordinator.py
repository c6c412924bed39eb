"""The coordinator's messages: who of the workers is there, what they report, and which order each has."""

import dataclasses

import pytest

from aggregator.rounds.held_models import HeldModels
from aggregator.shards import membership as workers
from aggregator.shards.coordinator import WorkerMessages, waiting_words
from aggregator.shards.membership import presence_of
from aggregator.shards.worker import read_order
from aggregator.status.facts import WorkerStatus
from aggregator.strategies.base import RoundPlan, train_assignment
from crypto.seal.envelope import seal_message_to_member
from shoal.errors import UntrustedError
from shoal.protocol import channels
from shoal.protocol.chunking import split
from shoal.protocol.codec import encode
from shoal.protocol.jobs import Job, JobDone, JobKind, PartReport, StoredPart
from shoal.protocol.messages import Phase
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.topics import TopicKind
from tests.helpers.parties import TOPICS, Line, Parties
from tests.unit.shoal.protocol.test_shards import with_workers

NAMES = ("worker-0", "worker-1")
NOW = 1_795_000_000


class Scene:
    """A coordinator and two workers that have joined, without a network."""

    def __init__(self, root):
        parties = Parties(root, "dev-1", "dev-2")
        self.workers = []
        for name in NAMES:
            grant = parties.owner.add_helper("worker", workers.init(root / name, name).read_bytes())
            self.workers.append(workers.join(root / name, grant.read_bytes(), parties.owner.fingerprint))
        self.server, self.members = parties.server, parties.members
        self.run = dataclasses.replace(with_workers(2), fleet="reef", workers=parties.owner.workers)
        self.line, self.reports, self.answers = Line(), [], []
        self.messages = WorkerMessages(
            self.run, self.server, self.line, self.reports.append, b"plan", self.answers.append, clock=lambda: NOW
        )

    def take(self, topic, payload):
        self.messages.take(TOPICS.parse(topic), payload, 0.0)

    def tell(self, number, birth=1, *, online=True):
        """Let a worker come or go."""
        self.take(*presence_of(self.workers[number], birth, online=online))

    def send(self, number, message, channel=channels.REPORT, on=None):
        """Send a worker's sealed message, on its own topic or another's."""
        identity, receiver = self.workers[number].identity, self.server.identity.member
        parcel = seal_message_to_member(
            identity, receiver.seal_key, channel.head("reef", identity.name, receiver.name), encode(message)
        )
        for chunk in split(parcel.payload, kind=channel.kind, round=0, chunk_bytes=1 << 16, name=parcel.transfer_id):
            self.take(TOPICS.at(TopicKind.REPORT, on or identity.name), chunk)

    def report(self, number, run_id=None, worker=None):
        parts = (StoredPart("dev-1", Phase.TRAIN, bytes(32), 1.0),)
        return PartReport(run_id or self.run.run_id, number if worker is None else worker, 1, parts)

    def orders(self, number):
        """Return the orders that a worker was sent since the last time."""
        sent, self.line.sent = self.line.sent, []
        topic, chunks = TOPICS.at(TopicKind.JOB, NAMES[number]), Reassembler()
        transfers = [
            chunks.add("job", payload, 0.0, channels.SHARD_ORDER.limit()) for t, payload, _ in sent if t == topic
        ]
        return [read_order(self.workers[number], transfer) for transfer in transfers if transfer is not None]

    def order(self, round_=1):
        train = train_assignment((0,), evaluate=False)
        idle = dataclasses.replace(train, train=False)
        plan = RoundPlan(round_, {}, {"dev-2": train, "dev-1": train, "dev-3": idle})
        self.messages.order(plan, bytes(16), HeldModels.none(0))


@pytest.fixture
def scene(tmp_path):
    return Scene(tmp_path)


def test_workers_are_absent_at_first(scene):
    """Workers are absent until their presence comes."""
    assert scene.messages.absent == NAMES
    scene.tell(1)
    assert scene.messages.absent == ("worker-0",)
    scene.tell(0, birth=5)
    scene.tell(0, birth=4, online=False)
    assert scene.messages.absent == (), "the will of an earlier incarnation"
    scene.tell(0, birth=5, online=False)
    assert scene.messages.absent == ("worker-0",)


def test_presence_counts_on_its_own_topic(scene):
    """A presence counts on its own topic only."""
    _, payload = presence_of(scene.workers[0], 1, online=True)
    with pytest.raises(UntrustedError):
        scene.take(TOPICS.at(TopicKind.WORKER_STATE, "worker-1"), payload)
    with pytest.raises(UntrustedError, match="worker-7 is neither a worker nor the keeper"):
        scene.take(TOPICS.at(TopicKind.WORKER_STATE, "worker-7"), payload)
    assert scene.messages.absent == NAMES


def test_reports_come_to_their_takers(scene):
    """Reports and answers come to their takers and status knows when."""
    scene.tell(0)
    scene.send(0, scene.report(0))
    done = JobDone(scene.run.run_id, 0, 7, (bytes(32),))
    scene.send(0, done, channels.JOB_DONE)
    assert (scene.reports, scene.answers) == ([scene.report(0)], [done])
    assert scene.messages.facts({1: 3}) == (
        WorkerStatus(name="worker-0", online=True, last_report_s=NOW),
        WorkerStatus(name="worker-1", online=False, lacking=3),
    )


def test_false_report_is_refused(scene):
    """A report in anothers name or of another run is refused."""
    with pytest.raises(UntrustedError, match="where a message of worker-1 belongs"):
        scene.send(0, scene.report(0), on="worker-1")
    with pytest.raises(UntrustedError, match="a report of worker 1 by worker-0"):
        scene.send(0, scene.report(0, worker=1))
    with pytest.raises(UntrustedError, match="another run"):
        scene.send(0, scene.report(0, run_id=b"x" * 16))
    assert scene.reports == []
    assert scene.messages.facts({})[0].last_report_s is None


def test_order_is_repeated_to_newcomers(scene):
    """Every worker gets the order and once more when it comes online."""
    scene.tell(0)
    assert scene.orders(0) == [], "there is no order yet"
    scene.order(round_=3)
    (order,) = scene.orders(1)
    assert (order.round, order.keep, order.devices, order.plan) == (3, 2, ("dev-1", "dev-2"), b"plan")
    assert not order.finished
    scene.order(round_=4)
    scene.orders(1)
    scene.tell(1)
    (again,) = scene.orders(1)
    assert (again.round, again.number, again.birth) == (4, order.number + 1, order.birth)


def test_a_job_goes_to_one_worker(scene):
    job = Job(
        run_id=scene.run.run_id,
        number=1,
        kind=JobKind.NORMS,
        round=1,
        generation="",
        devices=(),
        digests=(),
        nodes=(),
        vectors=(),
    )
    scene.messages.job(1, job)
    assert {topic for topic, _, _ in scene.line.sent} == {TOPICS.at(TopicKind.JOB, "worker-1")}


def test_what_a_round_waits_for_in_words(scene):
    assert waiting_words(scene.run, (), {}) == ""
    assert waiting_words(scene.run, (), {1: 2, 0: 1}) == "parts not reported by worker-0 (1), worker-1 (2)"
    assert waiting_words(scene.run, ("worker-1",), {0: 1}) == "worker worker-1 is not connected"
