"""Sums of the workers' blocks over torch.distributed: the two ends of a process group with the backend Gloo.

Rules
-----

- Only numbers travel here: blocks of products and squared norms, float64, and one number before them that says whether a worker
  can do its job. Jobs, reports and digests go over MQTT, signed by their senders. torch.distributed has neither
  authentication nor encryption, so the group's sockets are bound to one network interface, which the operator names.
- The group is made when a job first needs it, under a fresh name (the *generation*). Its members learn each other's addresses
  over MQTT, sealed (`MeetingStore`). If a peer is lost, the group is given up, and the next attempt makes another
  one. MQTT connections and files are not concerned, so a worker that a service manager has started alone joins the next
  generation.
- The coordinator receives each block from the workers in the order of their numbers and adds it at once: the same workers give
  the same bits.

Example: two workers and 20 updates. Each sends a zero and a block of 20 x 20; the coordinator adds the second to the first.

torch.distributed's own store listens on a port, keeps what anyone writes to it, and lists it to anyone who asks. `MeetingStore`
opens no socket. A member's address goes over MQTT, signed and sealed, and nothing else gets into the store.
"""

from __future__ import annotations

import dataclasses
import datetime
import fcntl
import logging
import os
import queue
import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch
import torch.distributed as dist

from aggregator.numerics.checks import NumericsError
from aggregator.shards.calculation import ShardsUnavailableError, block_shapes
from shoal.errors import ConfigError, UntrustedError
from shoal.protocol.jobs import GroupAddress, Job, JobDone, JobKind

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from aggregator.shards.coordinator import WorkerMessages

JOIN_S: Final = 60.0
"""Longest time for all workers to join a new process group: a busy machine takes half of it to load torch."""
KEYS_PER_MEMBER: Final = 4
"""Most addresses that a group has for each member; Gloo writes one."""


class MeetingStore(dist.Store):  # type: ignore[name-defined, misc]
    """The addresses of one generation of a process group (`torch.distributed.Store`).

    Args:
        generation: of the group.
        members: number of its members.
        send: sends this member's own addresses to the others.
    """

    def __init__(self, generation: str, members: int, send: Callable[[GroupAddress], None]) -> None:
        super().__init__()
        self.generation = generation
        self._most = KEYS_PER_MEMBER * members
        self._send = send
        self._found: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._given_up = False

    def take(self, addresses: Sequence[GroupAddress]) -> None:
        """Take the addresses of other members; those of another generation are left out, and none is ever replaced.

        Raises:
            UntrustedError: they are more than a group has.
        """
        with self._changed:
            for address in addresses:
                if address.generation == self.generation:
                    if address.key not in self._found and len(self._found) == self._most:
                        raise UntrustedError(f"more than {self._most} addresses for one process group")
                    self._found.setdefault(address.key, address.value)
            self._changed.notify_all()

    def give_up(self) -> None:
        """End all waits: another generation has begun."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:
        """Keep this member's own address, and send it to the others."""
        address = GroupAddress(self.generation, key, bytes(value))
        self.take([address])
        self._send(address)

    def get(self, key: str) -> bytes:
        """Return an address once it is here; raises as `wait`."""
        self.wait([key])
        return self._found[key]

    def wait(self, keys: Sequence[str], *_timeout: Any) -> None:
        """Wait until addresses are here.

        Raises:
            RuntimeError: one did not come within JOIN_S, or the group was given up.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or self._holds(keys), JOIN_S)
            if not self._holds(keys):
                raise RuntimeError(f"no address of a member within {JOIN_S:g} s, or the group was given up")

    def _holds(self, keys: Sequence[str]) -> bool:
        return all(key in self._found for key in keys)


LOG = logging.getLogger("shoal.shards")
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

    def join(self, store: MeetingStore, rank: int, size: int) -> None:
        self.leave()
        dist.init_process_group(
            "gloo",
            store=store,
            rank=rank,
            world_size=size,
            timeout=datetime.timedelta(seconds=BLOCK_S),
        )
        self.generation, self._store = store.generation, store

    def leave(self) -> None:
        if dist.is_initialized():
            dist.destroy_process_group()
        self.generation, self._store = "", None


class DistributedLink:
    """The coordinator's end (`aggregator.shards.calculation.JobLink`). Its calls block, so they run on the numerics thread.

    Args:
        messages: sends jobs and receives answers over MQTT.
        workers: their number.
        interface: the network interface to bind to.
    """

    def __init__(self, messages: WorkerMessages, workers: int, interface: str) -> None:
        self._messages = messages
        self._workers = workers
        address_of(interface)
        self._group = _Group(interface)
        self._meeting: tuple[MeetingStore, Job] | None = None
        self._order = threading.Lock()
        self._done: queue.SimpleQueue[JobDone] = queue.SimpleQueue()
        messages.on_done = self._take

    def sums(self, jobs: Sequence[Job]) -> Iterator[NDArray[np.float64]]:
        """Yield the sums of the workers' blocks, added in the order of the workers."""
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

    def _take(self, done: JobDone) -> None:
        """Take a worker's message: its answer to a job, or its addresses, which the other workers need too."""
        if not done.addresses:
            self._done.put(done)
        elif self._meeting is not None:
            self._meeting[0].take(done.addresses)
            for address in done.addresses:
                self._pass_on(address)

    def _pass_on(self, address: GroupAddress) -> None:
        assert self._meeting is not None
        store, job = self._meeting
        with self._order:
            for number in range(self._workers if address.generation == store.generation else 0):
                self._messages.job(number, dataclasses.replace(job, addresses=(address,)))

    def _send(self, jobs: Sequence[Job]) -> None:
        """Send jobs of sums, and make the process group if there is none."""
        if self._messages.absent:
            raise ShardsUnavailableError("a worker is not connected", self._messages.absent)
        store, generation = None, self._group.generation
        if not generation:
            generation = uuid.uuid4().hex
            store = MeetingStore(generation, self._workers + 1, self._pass_on)
            meet = dataclasses.replace(
                jobs[0], kind=JobKind.MEET, generation=generation, devices=(), digests=(), nodes=(), vectors=(), count=0
            )
            self._meeting = store, meet
        with self._order:  # a MEET before its job would be lost
            for number, job in enumerate(jobs):
                self._messages.job(number, dataclasses.replace(job, generation=generation))
        if store is not None:
            try:
                self._group.join(store, 0, self._workers + 1)
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
        tell: sends the worker's addresses to the coordinator.
    """

    def __init__(self, number: int, workers: int, interface: str, tell: Callable[[GroupAddress], None]) -> None:
        address_of(interface)
        self._rank, self._size = number + 1, workers + 1
        self._group = _Group(interface)
        self._tell = tell
        self._store: MeetingStore | None = None

    def expect(self, job: Job) -> None:
        """Prepare for a job of sums, or take the addresses of a MEET. Call it in the order in which jobs arrive.

        Raises:
            UntrustedError: more addresses than a group has.
        """
        if job.kind is JobKind.MEET:
            if self._store is not None:
                self._store.take(job.addresses)
        elif self._store is None or self._store.generation != job.generation:
            if self._store is not None:
                self._store.give_up()
            self._store = MeetingStore(job.generation, self._size, self._tell)

    def send(self, job: Job, blocks: Callable[[], Iterator[NDArray[np.float64]]] | None) -> None:
        """Send the blocks of an expected job to the coordinator; None says that the worker can't do the job."""
        try:
            store = self._store
            if store is None or store.generation != job.generation:
                raise RuntimeError("the coordinator has given the process group up")
            if job.generation != self._group.generation:
                self._group.join(store, self._rank, self._size)
            dist.send(torch.tensor([_OK if blocks is not None else _FAILED], dtype=torch.float64), 0)
            for block in blocks() if blocks is not None else ():
                dist.send(torch.from_numpy(np.ascontiguousarray(block)), 0)
        except (RuntimeError, ValueError) as error:
            LOG.warning("a job was given up", extra={"kv": {"number": job.number, "reason": str(error)[:200]}})
            self._group.leave()

    def close(self) -> None:
        """Leave the process group."""
        self._group.leave()
