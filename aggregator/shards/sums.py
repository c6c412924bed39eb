"""Sums of the workers' blocks over torch.distributed: the two ends of a process group with the backend Gloo.

Rules
-----

- Only numbers travel here: blocks of products and squared norms, float64, and one number before them that says whether a worker
  can do its job. Jobs, reports and digests go over MQTT, signed by their senders. torch.distributed has neither
  authentication nor encryption, so the group's sockets are bound to one network interface, which the operator names.
- The group is made when a job first needs it, under a fresh name (the *generation*), through a key-value store of the
  coordinator's. If a peer is lost, the group is given up, and the next attempt makes another one. MQTT connections and files
  are not concerned, so a worker that a service manager has started alone joins the next generation.
- The coordinator receives each block from the workers in the order of their numbers and adds it at once: the same workers give
  the same bits.

Example: two workers and 20 updates. Each sends a zero and a block of 20 x 20; the coordinator adds the second to the first.
"""

from __future__ import annotations

import datetime
import fcntl
import logging
import os
import queue
import socket
import struct
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aggregator.shards.calculation import block_shapes
from aggregator.shards.space import ShardsUnavailableError
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aggregator.shards.coordinator import WorkerMessages
    from shoal.protocol.shards import Job, JobDone

LOG = logging.getLogger("shoal.shards")
JOIN_S: Final = 20.0
"""Longest time for all workers to join a new process group."""
BLOCK_S: Final = 600.0
"""Longest time for one block of products, or for the means of a round."""
LOOK_S: Final = 0.1
"""Interval of the checks whether a worker is still there."""
_SIOCGIFADDR: Final = 0x8915
_OK: Final = 0.0
_FAILED: Final = 1.0


def address_of(interface: str) -> str:
    """Return the IPv4 address of a network interface of this machine.

    Raises:
        ConfigError: there is no such interface, or it has no IPv4 address.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            found = fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, struct.pack("256s", interface[:15].encode()))
        except OSError as error:
            known = ", ".join(name for _, name in socket.if_nameindex())
            raise ConfigError(
                f"no network interface {interface!r} with an IPv4 address", hint=f"this machine has {known}"
            ) from error
    return socket.inet_ntoa(found[20:24])


class _Group:
    """The process group of one generation; every process has at most one."""

    def __init__(self, interface: str) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = interface
        self.generation = ""
        self._store: Any = None

    def join(self, store: Any, generation: str, rank: int, size: int) -> None:
        import torch.distributed as dist

        self.leave()
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore(generation, store),  # type: ignore[attr-defined]
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=BLOCK_S),
        )
        self.generation, self._store = generation, store

    def leave(self) -> None:
        import torch.distributed as dist

        if dist.is_initialized():
            dist.destroy_process_group()
        self.generation, self._store = "", None


class DistributedLink:
    """The coordinator's end (`aggregator.shards.space.JobLink`). Its calls block, so they run on the numerics thread.

    Args:
        messages: sends jobs and receives answers over MQTT.
        workers: their number.
        interface: the network interface to bind to.
    """

    def __init__(self, messages: WorkerMessages, workers: int, interface: str) -> None:
        self._messages = messages
        self._workers = workers
        self._host = address_of(interface)
        self._group = _Group(interface)
        self._where = ""
        self._done: queue.SimpleQueue[JobDone] = queue.SimpleQueue()
        messages.on_done = self._done.put

    def sums(self, jobs: Sequence[Job]) -> Iterator[NDArray[np.float64]]:
        """Yield the sums of the workers' blocks, added in the order of the workers."""
        import torch
        import torch.distributed as dist

        self._send(jobs)
        try:
            for rank in range(1, self._workers + 1):
                told = torch.empty(1, dtype=torch.float64)
                dist.recv(told, rank)
                if told.item() != _OK:
                    raise ShardsUnavailableError(f"worker {rank - 1} lacks parts of the round, see its log")
            for shape in block_shapes(jobs[0]):
                total = np.zeros(shape)
                block = torch.empty(shape, dtype=torch.float64)
                for rank in range(1, self._workers + 1):
                    dist.recv(block, rank)
                    total += block.numpy()
                yield total
        except (RuntimeError, ShardsUnavailableError) as error:
            self._group.leave()
            if isinstance(error, ShardsUnavailableError):
                raise
            raise ShardsUnavailableError(f"a worker was lost: {str(error)[:200]}", self._messages.absent) from error

    def answers(self, jobs: Sequence[Job]) -> list[JobDone]:
        """Return the workers' answers to a job of means."""
        from aggregator.numerics.errors import NumericsError

        for number, job in enumerate(jobs):
            self._messages.job(number, job)
        found: dict[int, JobDone] = {}
        end_s = time.monotonic() + BLOCK_S
        while len(found) < self._workers:
            try:
                done = self._done.get(timeout=LOOK_S)
            except queue.Empty:
                if self._messages.absent or time.monotonic() > end_s:
                    raise ShardsUnavailableError("a worker made no means", self._messages.absent) from None
                continue
            if done.number == jobs[0].number:
                if done.error:
                    raise NumericsError(done.error)
                if done.lacking:
                    raise ShardsUnavailableError(
                        f"worker {done.worker} lacks the parts of {', '.join(done.lacking[:3])}"
                    )
                found[done.worker] = done
        return [found[number] for number in range(self._workers)]

    def _send(self, jobs: Sequence[Job]) -> None:
        """Send jobs of sums, and make the process group if there is none."""
        import dataclasses

        import torch.distributed as dist

        if self._messages.absent:
            raise ShardsUnavailableError("a worker is not connected", self._messages.absent)
        store, generation = None, self._group.generation
        if not generation:
            generation = uuid.uuid4().hex
            listening = socket.create_server((self._host, 0), backlog=2 * self._workers)
            port = listening.getsockname()[1]
            store = dist.TCPStore(  # type: ignore[attr-defined]
                self._host,
                port,
                is_master=True,
                wait_for_workers=False,
                timeout=datetime.timedelta(seconds=JOIN_S),
                master_listen_fd=listening.detach(),
            )
            self._where = f"{self._host}:{port}"
        for number, job in enumerate(jobs):
            self._messages.job(number, dataclasses.replace(job, generation=generation, store=self._where))
        if store is not None:
            try:
                self._group.join(store, generation, 0, self._workers + 1)
            except RuntimeError as error:
                self._group.leave()
                raise ShardsUnavailableError(
                    f"the workers did not join: {str(error)[:200]}", self._messages.absent
                ) from error


class BlockSender:
    """A worker's end: sends the blocks of a job. It blocks, so it runs on a thread of its own.

    Args:
        number: of the worker.
        workers: their number.
        interface: the network interface to bind to.
    """

    def __init__(self, number: int, workers: int, interface: str) -> None:
        address_of(interface)
        self._rank, self._size = number + 1, workers + 1
        self._group = _Group(interface)

    def send(self, job: Job, blocks: Callable[[], Iterator[NDArray[np.float64]]] | None) -> None:
        """Send a job's blocks to the coordinator; None says that the worker can't do the job."""
        import torch
        import torch.distributed as dist

        try:
            if job.generation != self._group.generation:
                host, _, port = job.store.rpartition(":")
                store = dist.TCPStore(  # type: ignore[attr-defined]
                    host,
                    int(port),
                    is_master=False,
                    wait_for_workers=False,
                    timeout=datetime.timedelta(seconds=JOIN_S),
                )
                self._group.join(store, job.generation, self._rank, self._size)
            dist.send(torch.tensor([_OK if blocks is not None else _FAILED], dtype=torch.float64), 0)
            for block in blocks() if blocks is not None else ():
                dist.send(torch.from_numpy(np.ascontiguousarray(block)), 0)
        except (RuntimeError, ValueError) as error:
            LOG.warning("a job was given up", extra={"kv": {"number": job.number, "reason": str(error)[:200]}})
            self._group.leave()

    def close(self) -> None:
        """Leave the process group."""
        self._group.leave()
