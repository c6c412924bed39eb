"""Sums over torch.distributed: blocks of two workers in processes of their own, and each way in which a worker can fail."""

import multiprocessing

import numpy as np
import pytest

from aggregator.numerics.errors import NumericsError
from aggregator.shards import sums
from aggregator.shards.space import ShardsUnavailableError
from aggregator.shards.sums import BlockSender, DistributedLink, address_of
from shoal.errors import ConfigError
from shoal.protocol.shards import Job, JobDone, JobKind, NodeKind, VectorNode

WORKERS = 2
BLOCKS = {0: [[2.0], [1e16]], 1: [[0.5], [-1e16]]}
"""Squared norms of two vectors, by worker."""
LOST, LACKS = 99, 98
"""Numbers of jobs at which worker 1 ends, or says that it lacks parts."""


def job(number=1, kind=JobKind.NORMS):
    nodes = tuple(VectorNode(NodeKind.UPDATE, items=(place,)) for place in range(2))
    return Job(
        run_id=bytes(16),
        number=number,
        kind=kind,
        round=1,
        generation="",
        store="",
        devices=("dev-1", "dev-2"),
        digests=(bytes(32),) * 2,
        nodes=nodes,
        vectors=(0, 1),
    )


class Messages:
    """Hands jobs to queues in place of MQTT."""

    def __init__(self, queues=()):
        self.queues, self.absent, self.jobs = queues, (), []
        self.on_done = lambda _done: None

    def job(self, number, found):
        self.jobs.append((number, found))
        if self.queues:
            self.queues[number].put(found)


def work(number, jobs):
    """Serve jobs as a worker does, until there is none."""
    sender = BlockSender(number, WORKERS, "lo")
    while (found := jobs.get()) is not None and not (number == 1 and found.number == LOST):
        lacks = number == 1 and found.number == LACKS
        sender.send(found, None if lacks else lambda: iter([np.array(BLOCKS[number])]))
    sender.close()


@pytest.fixture
def workers():
    """Two workers in processes; yield the coordinator's messages to them."""
    context = multiprocessing.get_context("spawn")
    queues = [context.Queue() for _ in range(WORKERS)]
    programs = [context.Process(target=work, args=(n, jobs), daemon=True) for n, jobs in enumerate(queues)]
    for program in programs:
        program.start()
    yield Messages(queues)
    for jobs in queues:
        jobs.put(None)
    for program in programs:
        program.join(20)
        assert program.exitcode == 0


def test_blocks_are_added_and_a_group_is_made_anew_after_a_loss(workers, monkeypatch):
    monkeypatch.setattr(sums, "JOIN_S", 60.0)
    link = DistributedLink(workers, WORKERS, "lo")
    jobs = [job(), job()]
    first, again = [block.tolist() for block in link.sums(jobs)], [block.tolist() for block in link.sums(jobs)]
    assert first == again == [[[2.5], [0.0]]]
    generations = [found.generation for _, found in workers.jobs]
    assert generations == [generations[0]] * 4, "one group serves several jobs"
    assert all(found.store.startswith("127.0.0.1:") for _, found in workers.jobs)
    with pytest.raises(ShardsUnavailableError, match="worker 1 lacks parts"):
        next(link.sums([job(LACKS)] * 2))
    assert [block.tolist() for block in link.sums(jobs)] == first
    assert workers.jobs[-1][1].generation != generations[0]
    workers.absent = ("worker-1",)
    with pytest.raises(ShardsUnavailableError, match="not connected"):
        next(link.sums(jobs))
    workers.absent = ()
    with pytest.raises(ShardsUnavailableError, match="a worker was lost"):
        list(link.sums([job(LOST)] * 2))


def test_an_interface_is_named_and_has_an_address():
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match="no network interface 'nowhere0'") as caught:
        address_of("nowhere0")
    assert "lo" in caught.value.hint
    with pytest.raises(ConfigError):
        BlockSender(0, WORKERS, "nowhere0")


def answering(*answers):
    """Return a link whose workers give these answers, and an older one before them."""
    messages = Messages()
    link = DistributedLink(messages, WORKERS, "lo")
    for done in (JobDone(bytes(16), 0, 1, error="of an earlier job"), *answers):
        messages.on_done(done)
    return link, messages


def test_answers_come_in_the_order_of_the_workers():
    one, zero = JobDone(bytes(16), 1, 5, (bytes(32),)), JobDone(bytes(16), 0, 5, (b"\1" * 32,))
    link, messages = answering(one, zero)
    assert link.answers([job(5), job(5)]) == [zero, one]
    assert [number for number, _ in messages.jobs] == [0, 1]


def test_an_answer_that_is_an_error_or_lacks_parts_is_raised():
    link, _ = answering(JobDone(bytes(16), 0, 5, error="the mean is not finite"))
    with pytest.raises(NumericsError, match="not finite"):
        link.answers([job(5), job(5)])
    link, _ = answering(JobDone(bytes(16), 1, 5, lacking=("dev-1",)))
    with pytest.raises(ShardsUnavailableError, match="worker 1 lacks the parts of dev-1"):
        link.answers([job(5), job(5)])


def test_a_worker_that_goes_while_it_is_asked_is_named(monkeypatch):
    monkeypatch.setattr(sums, "LOOK_S", 0.01)
    link, messages = answering(JobDone(bytes(16), 0, 5))
    messages.absent = ("worker-1",)
    with pytest.raises(ShardsUnavailableError, match="made no means") as caught:
        link.answers([job(5), job(5)])
    assert caught.value.names == ("worker-1",)
    monkeypatch.setattr(sums, "BLOCK_S", 0.0)
    link, _ = answering()
    with pytest.raises(ShardsUnavailableError, match="made no means"):
        link.answers([job(5), job(5)])
