"""The program of one worker, which follows the runs that the coordinator names."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from aggregator.owner_inbox import GrantInbox
from aggregator.shards.helper import HelperDaemon
from aggregator.shards.membership import WorkerMembership
from aggregator.shards.sums import BlockSender
from aggregator.shards.worker import WorkerService, read_order
from aggregator.workers import ThreadWorkers
from shoal.errors import ConfigError, UntrustedError
from shoal.membership.signed_plans import open_package
from shoal.protocol import channels
from shoal.protocol.codec import decode
from shoal.protocol.documents import RunPackage
from shoal.protocol.jobs import Job, JobKind, ShardOrder
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Connected, Message, TransportEvent
from shoal.util.files import serving

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aggregator.config import AggregatorConfig

LOG = logging.getLogger("shoal.worker")


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


class WorkerDaemon(HelperDaemon):
    """Drives one worker."""

    def __init__(self, config: AggregatorConfig, directory: Path) -> None:
        super().__init__(config, directory)
        self._config = config
        self._topics = Topics(self.membership.fleet)
        self._chunks = Reassembler()
        self._grants = GrantInbox(self.membership)
        self._service: WorkerService | None = None
        self._sender: BlockSender | None = None
        self._jobs = ThreadWorkers(self.inbox.put, "shoal-sums")

    def subscribe(self) -> None:
        """Subscribe to the owner's keys and the coordinator's orders; the run that is served subscribes to the rest."""
        self._grants.subscribe(self.transport)
        self.transport.subscribe(self._topics.filter(TopicKind.JOB, self.membership.identity.name))

    def handle(self, event: TransportEvent) -> None:
        """Hand an event to the run that is served, or begin the one that it orders."""
        if self._service is not None:
            self._service.on_event(event, time.monotonic())
        elif isinstance(event, Connected):
            self.tell_presence(online=True)
        elif (
            isinstance(event, Message)
            and event.payload
            and not self._grants.take(event.topic, event.payload, time.monotonic())
        ):
            self._look_for_order(event)

    def tick(self, now_s: float) -> None:
        """Make parts durable, and ask for missing ones."""
        if self._service is not None:
            self._service.flush(now_s)
            self._service.tick(now_s)

    def close(self) -> None:
        """Close the run that is served."""
        if self._service is not None:
            self._service.close()

    def _look_for_order(self, message: Message) -> None:
        """Begin the run of an order, while none is served."""
        if self._topics.parse(message.topic).kind is not TopicKind.JOB:
            return
        allowed = {**channels.JOB.limit(), **channels.SHARD_ORDER.limit()}
        transfer = self._chunks.add("job", message.payload, time.monotonic(), allowed)
        if transfer is not None and transfer.kind is channels.SHARD_ORDER.kind:
            self._begin(read_order(self.membership, transfer))

    def _begin(self, order: ShardOrder) -> None:
        """Follow the run of an order in place of the one before."""
        run = open_package(decode(order.plan, RunPackage), self.membership.owner_key)
        if (run.fleet, run.run_id) != (self.membership.fleet, order.run_id):
            raise UntrustedError("an order with the plan of another run")
        if self._service is not None:
            if run.run <= self._service.run.run:
                raise UntrustedError(f"an order of run {run.run} after run {self._service.run.run}")
            self._service.close()
            self._service = None
        service = WorkerService(
            self.membership,
            run,
            self.transport,
            self.membership.directory,
            birth=self.birth,
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
