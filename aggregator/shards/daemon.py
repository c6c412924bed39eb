"""The program of one worker: follows the runs that the coordinator names, one after another."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from aggregator.owner_inbox import GrantInbox
from aggregator.shards.membership import WorkerMembership, witness
from aggregator.shards.sums import BlockSender
from aggregator.shards.worker import WorkerService, read_order, worker_presence
from aggregator.workers import ThreadWorkers
from shoal import limits
from shoal.address import BrokerAddress
from shoal.errors import ConfigError, ShoalError, TakenOverError, UntrustedError, reason_of
from shoal.membership.signed_plans import open_package
from shoal.protocol import channels
from shoal.protocol.codec import decode
from shoal.protocol.documents import RunPackage
from shoal.protocol.jobs import JobKind
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Connected, Message, TakenOver, TransportEvent
from shoal.transport.inbox import Inbox
from shoal.transport.mqtt import MqttTransport
from shoal.util.files import serving
from shoal.util.log_throttle import Refusals
from shoal.util.service_manager import ServiceManager

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aggregator.config import AggregatorConfig
    from shoal.protocol.jobs import Job, ShardOrder

LOG = logging.getLogger("shoal.worker")
POLL_S: Final = 0.25


def serve(config: AggregatorConfig, directory: Path) -> None:
    """Serve one worker until it is stopped.

    Raises:
        ConfigError: no network interface is named.
        NotEnrolledError: the directory has not joined a fleet.
    """
    if not config.interface:
        raise ConfigError("a worker needs the network interface for sums", hint="give --interface, such as lo or wg0")
    WorkerMembership(directory)  # before a file is written
    with serving(directory, hint="one program serves a worker; end the other first"):
        WorkerDaemon(config, directory).serve()


class _Stop(Exception):  # noqa: N818 - a request, not an error
    """The program was asked to stop."""


class WorkerDaemon:
    """Drives one worker on a real broker."""

    def __init__(self, config: AggregatorConfig, directory: Path) -> None:
        self._config = config
        self._directory = directory
        self._membership = WorkerMembership(directory)
        self._birth = time.time_ns()
        self._inbox = Inbox()
        self._topics = Topics(self._membership.fleet)
        self._chunks = Reassembler()
        self._grants = GrantInbox(self._membership)
        self._refusals = Refusals(LOG)
        self._service: WorkerService | None = None
        self._sender: BlockSender | None = None
        self._jobs = ThreadWorkers(self._inbox.put, "shoal-sums")
        address = BrokerAddress.of(config, self._membership.grant)
        name, will = self._membership.identity.name, worker_presence(self._membership, self._birth, online=False)
        self._transport = MqttTransport(
            address,
            f"shoal-{self._membership.fleet}-{name}",
            self._inbox.put,
            will=will,
            witness=witness(self._membership.identity, self._membership.fleet, will[0], self._birth),
            session_expiry_s=limits.SESSION_EXPIRY_AGGREGATOR_S,
            manual_ack=True,
            max_queued_bytes=limits.MAX_PENDING_BYTES,
        )
        self._manager = ServiceManager.from_environment()

    def serve(self) -> None:
        """Run until stopped.

        Raises:
            BrokerUnreachableError: the first connection failed.
            TakenOverError: another program with this worker's identity began before this one.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._inbox.put(None))
        name = self._membership.identity.name
        self._grants.subscribe(self._transport)
        self._transport.subscribe(self._topics.filter(TopicKind.JOB, name))
        self._transport.start(require=True)
        self._tell_presence()
        LOG.info("serving", extra={"kv": {"fleet": self._membership.fleet, "worker": name}})
        self._manager.ready("connected")
        try:
            while True:
                for event in self._inbox.batch(POLL_S):
                    self._handle(event)
                now_s = time.monotonic()
                if self._service is not None:
                    self._service.flush(now_s)
                    self._service.tick(now_s)
                self._manager.alive(now_s)
        except _Stop:
            LOG.info("stopping")
        finally:
            self._manager.stopping()
            topic, payload = worker_presence(self._membership, self._birth, online=False)
            self._transport.publish(topic, payload, retain=True)
            self._transport.close()
            if self._service is not None:
                self._service.close()

    def _tell_presence(self) -> None:
        topic, payload = worker_presence(self._membership, self._birth, online=True)
        self._transport.publish(topic, payload, retain=True)

    def _handle(self, event: TransportEvent | Callable[[], None] | None) -> None:
        if event is None:
            raise _Stop
        if isinstance(event, TakenOver):
            raise TakenOverError(
                "another program took over this session: it has this worker's identity, and began before this one",
                hint="a worker runs once: end the other one",
            )
        if not isinstance(event, Message | Connected) and callable(event):
            event()
        elif self._service is not None:
            self._service.on_event(event, time.monotonic())
        elif isinstance(event, Connected):
            self._tell_presence()
        elif isinstance(event, Message) and event.payload:
            try:
                if not self._grants.take(event.topic, event.payload, time.monotonic()):
                    self._look_for_order(event)
            except ShoalError as error:
                self._refusals.tell(event.topic, reason_of(error), error.hint, time.monotonic())

    def _look_for_order(self, message: Message) -> None:
        """Begin the run of an order, while none is served."""
        if self._topics.parse(message.topic).kind is not TopicKind.JOB:
            return
        allowed = {**channels.JOB.limit(), **channels.SHARD_ORDER.limit()}
        transfer = self._chunks.add("job", message.payload, time.monotonic(), allowed)
        if transfer is not None and transfer.kind is channels.SHARD_ORDER.kind:
            self._begin(read_order(self._membership, transfer))

    def _begin(self, order: ShardOrder) -> None:
        """Follow the run of an order in place of the one before."""
        run = open_package(decode(order.plan, RunPackage), self._membership.owner_key)
        if (run.fleet, run.run_id) != (self._membership.fleet, order.run_id):
            raise UntrustedError("an order with the plan of another run")
        if self._service is not None:
            if run.run <= self._service.run.run:
                raise UntrustedError(f"an order of run {run.run} after run {self._service.run.run}")
            self._service.close()
            self._service = None
        service = WorkerService(
            self._membership,
            run,
            self._transport,
            self._directory,
            birth=self._birth,
            send_blocks=self._send_blocks,
            other_run=self._begin,
        )
        if self._sender is not None:
            self._sender.close()
        self._sender = BlockSender(service.number, len(run.workers), self._config.interface, service.tell_address)
        self._service = service
        service.start(time.monotonic())
        service.take_order(order)
        LOG.info("run", extra={"kv": {"run": run.run, "worker": service.number, "of": len(run.workers)}})

    def _send_blocks(self, job: Job, blocks: Callable[[], Iterator[NDArray[np.float64]]] | None) -> None:
        sender = self._sender
        assert sender is not None
        sender.expect(job)
        if job.kind is not JobKind.MEET:
            self._jobs.submit(lambda: sender.send(job, blocks))


def directory_of_rank(folder: Path) -> Path | None:
    """Return the worker's directory that this process serves under torchrun; None for the coordinator, rank 0.

    Args:
        folder: holds one directory for each worker of this machine; local ranks take them in the order of their names.

    Raises:
        ConfigError: there are fewer directories than ranks.
    """
    rank, local = int(os.environ["RANK"]), int(os.environ.get("LOCAL_RANK", os.environ["RANK"]))
    if rank == 0:
        return None
    place = local - 1 if rank == local else local
    found = sorted(path for path in folder.iterdir() if path.is_dir())
    if place >= len(found):
        raise ConfigError(
            f"{folder} has {len(found)} workers' directories, and this is process {place + 1} for one",
            hint="shoal-aggregator shard init, and --nproc-per-node: one for each worker, and one for the coordinator",
        )
    return found[place]
