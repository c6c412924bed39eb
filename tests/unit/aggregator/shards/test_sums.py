"""Sums over torch.distributed: blocks of two workers in processes of their own, and each way in which a worker can fail."""

import dataclasses
import multiprocessing
import queue
import socket
import threading
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist

from aggregator.numerics.checks import NumericsError
from aggregator.shards import sums
from aggregator.shards.calculation import ShardsUnavailableError
from aggregator.shards.sums import BlockSender, DistributedLink, address_of
from shoal.errors import ConfigError
from shoal.protocol.jobs import Job, JobDone, JobKind, NodeKind, VectorNode

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
        devices=("dev-1", "dev-2"),
        digests=(bytes(32),) * 2,
        nodes=nodes,
        vectors=(0, 1),
    )


class Messages:
    """Hands jobs to queues in place of MQTT."""

    def __init__(self, queues=(), back=None):
        self.queues, self.absent, self.jobs = queues, (), []
        self.on_done = lambda _done: None
        if back is not None:
            threading.Thread(target=self.read, args=(back,), daemon=True).start()

    def read(self, back):
        while (done := back.get()) is not None:
            self.on_done(done)

    def job(self, number, found):
        if found.kind is not JobKind.MEET:
            self.jobs.append((number, found))
        if self.queues:
            self.queues[number].put(found)


def work(number, jobs, back):
    """Serve jobs as a worker does, until there is none."""
    sender = BlockSender(
        number, WORKERS, "lo", lambda address: back.put(JobDone(bytes(16), number, 0, addresses=(address,)))
    )
    calls = queue.SimpleQueue()
    thread = threading.Thread(target=carry_out, args=(calls,))
    thread.start()
    while (found := jobs.get()) is not None and not (number == 1 and found.number == LOST):
        sender.expect(found)
        lacks = number == 1 and found.number == LACKS
        blocks = None if lacks else lambda: iter([np.array(BLOCKS[number])])
        if found.kind is not JobKind.MEET:
            calls.put(partial(sender.send, found, blocks))
    calls.put(None)
    thread.join()
    sender.close()


def carry_out(calls):
    while (call := calls.get()) is not None:
        call()


@pytest.fixture
def workers():
    """Two workers in processes; yield the coordinator's messages to them."""
    context = multiprocessing.get_context("spawn")
    queues, back = [context.Queue() for _ in range(WORKERS)], context.Queue()
    programs = [context.Process(target=work, args=(n, jobs, back), daemon=True) for n, jobs in enumerate(queues)]
    for program in programs:
        program.start()
    yield Messages(queues, back)
    back.put(None)
    for jobs in queues:
        jobs.put(None)
    for program in programs:
        program.join(20)
        assert program.exitcode == 0


@pytest.mark.slow
def test_blocks_are_added(workers):
    """Blocks are added and a group is made anew after a loss."""
    link = DistributedLink(workers, WORKERS, "lo")
    jobs = [job(), job()]
    first, again = [block.tolist() for block in link.sums(jobs)], [block.tolist() for block in link.sums(jobs)]
    assert first == again == [[[2.5], [0.0]]]
    generations = [found.generation for _, found in workers.jobs]
    assert generations == [generations[0]] * 4, "one group serves several jobs"
    assert stores_open_to_strangers() == [], "nobody but the members gets into the store that they meet at"
    assert [block.tolist() for block in link.sums(jobs)] == first, "and the group outlives a stranger"
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


def stores_open_to_strangers():
    """Return the ports of this process at which a store of torch.distributed's tells anyone how many keys it has."""
    inodes = {str(path.readlink()) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    rows = [line.split() for line in Path("/proc/self/net/tcp").read_text().splitlines()[1:]]
    listening = [int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
    assert listening, "Gloo itself listens"
    return [port for port in listening if answers_as_a_store(port)]


def answers_as_a_store(port):
    """Send what a client of `torch.distributed.TCPStore` sends, without a secret: a magic number, and a request for a count."""
    with socket.create_connection(("127.0.0.1", port), timeout=1) as stranger, suppress(OSError):
        stranger.sendall(b"\0" + (0x3C85F7CE).to_bytes(4, "little") + b"\7")
        stranger.shutdown(socket.SHUT_WR)
        return len(stranger.recv(8)) == 8
    return False


def test_the_store_of_torch_is_recognised():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        store = dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=taken.detach()
        )
    assert answers_as_a_store(store.port)


def test_newer_generation_ends_a_wait():
    """A wait ends when another generation begins."""
    sender = BlockSender(0, WORKERS, "lo", lambda _: None)
    first = dataclasses.replace(job(), generation="g")
    sender.expect(first)
    thread = threading.Thread(target=sender.send, args=(first, None))
    thread.start()
    sender.expect(dataclasses.replace(job(), generation="h"))
    thread.join(30)
    assert not thread.is_alive(), "it would wait for a minute"


def test_interface_is_named_and_has_address():
    assert address_of("lo") == "127.0.0.1"
    with pytest.raises(ConfigError, match="no network interface 'nowhere0'") as caught:
        address_of("nowhere0")
    assert "lo" in caught.value.hint
    with pytest.raises(ConfigError):
        BlockSender(0, WORKERS, "nowhere0", lambda _: None)


def answering(*answers):
    """Return a link whose workers give these answers, and an older one before them."""
    messages = Messages()
    link = DistributedLink(messages, WORKERS, "lo")
    for done in (JobDone(bytes(16), 0, 1, error="of an earlier job"), *answers):
        messages.on_done(done)
    return link, messages


def test_answers_come_in_order_of_workers():
    one, zero = JobDone(bytes(16), 1, 5, (bytes(32),)), JobDone(bytes(16), 0, 5, (b"\1" * 32,))
    link, messages = answering(one, zero)
    assert link.answers([job(5), job(5)]) == [zero, one]
    assert [number for number, _ in messages.jobs] == [0, 1]


def test_error_in_an_answer_is_raised():
    """An answer that is an error or lacks parts is raised."""
    link, _ = answering(JobDone(bytes(16), 0, 5, error="the mean is not finite"))
    with pytest.raises(NumericsError, match="not finite"):
        link.answers([job(5), job(5)])
    link, _ = answering(JobDone(bytes(16), 1, 5, lacking=("dev-1",)))
    with pytest.raises(ShardsUnavailableError, match="worker 1 lacks the parts of dev-1"):
        link.answers([job(5), job(5)])


def test_vanished_worker_is_named(monkeypatch):
    """A worker that goes while it is asked is named."""
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
