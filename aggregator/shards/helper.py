"""The base of the programs of workers and keepers on a real broker: connection, presence, the owner's keys, the loop.

It loads neither torch nor what calculates: a keeper runs on small machines.
"""

from __future__ import annotations

import logging
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Final

from aggregator.config import AggregatorConfig
from aggregator.shards.membership import WorkerMembership, presence_of, witness
from shoal import limits
from shoal.address import BrokerAddress
from shoal.errors import ShoalError, TakenOverError
from shoal.transport.base import Connected, Message, TakenOver, TransportEvent
from shoal.transport.inbox import Inbox
from shoal.transport.mqtt import MqttTransport
from shoal.util.log_throttle import Refusals
from shoal.util.service_manager import ServiceManager

LOG = logging.getLogger("shoal.worker")
POLL_S: Final = 0.25


class _Stop(Exception):  # noqa: N818 - a request, not an error
    """The program was asked to stop."""


class HelperDaemon(ABC):
    """The program of a worker or a keeper.

    Args:
        config: broker and files.
        directory: the party's.

    Attributes:
        transport: client of the broker.
        inbox: takes events of the transport, and callables that the loop is to call.
    """

    def __init__(self, config: AggregatorConfig, directory: Path) -> None:
        self.membership = WorkerMembership(directory)
        self.birth = time.time_ns()
        self.inbox = Inbox()
        self._refusals = Refusals(LOG)
        address = BrokerAddress.of(config, self.membership.grant)
        name, will = self.membership.identity.name, presence_of(self.membership, self.birth, online=False)
        self.transport = MqttTransport(
            address,
            f"shoal-{self.membership.fleet}-{name}",
            self.inbox.put,
            will=will,
            witness=witness(self.membership.identity, self.membership.fleet, will[0], self.birth),
            session_expiry_s=limits.SESSION_EXPIRY_AGGREGATOR_S,
            manual_ack=True,
            max_queued_bytes=limits.MAX_PENDING_BYTES,
        )
        self._manager = ServiceManager.from_environment()

    def serve(self) -> None:
        """Run until stopped.

        Raises:
            BrokerUnreachableError: the first connection failed.
            TakenOverError: another program with this party's identity began before this one.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.inbox.put(None))
        self.subscribe()
        self.transport.start(require=True)
        self.tell_presence(online=True)
        LOG.info("serving", extra={"kv": {"fleet": self.membership.fleet, "name": self.membership.identity.name}})
        self._manager.ready("connected")
        try:
            while True:
                for event in self.inbox.batch(POLL_S):
                    self._take(event)
                now_s = time.monotonic()
                self.tick(now_s)
                self._manager.alive(now_s)
        except _Stop:
            LOG.info("stopping")
        finally:
            self._manager.stopping()
            self.tell_presence(online=False)
            self.transport.close()
            self.close()

    def tell_presence(self, *, online: bool) -> None:
        """Publish whether this party is there."""
        self.transport.publish(*presence_of(self.membership, self.birth, online=online), retain=True)

    def _take(self, event: TransportEvent | Callable[[], None] | None) -> None:
        if event is None:
            raise _Stop
        if isinstance(event, TakenOver):
            raise TakenOverError(
                "another program took over this session: it has this party's identity, and began before this one",
                hint="it runs once: end the other one",
            )
        if not isinstance(event, Message | Connected) and callable(event):
            event()
            return
        try:
            self.handle(event)
        except ShoalError as error:
            topic = event.topic if isinstance(event, Message) else ""
            self._refusals.tell(topic, error, time.monotonic())

    @abstractmethod
    def subscribe(self) -> None:
        """Subscribe to what the party reads from its start on."""

    @abstractmethod
    def handle(self, event: TransportEvent) -> None:
        """Handle one event of the transport."""

    def tick(self, now_s: float) -> None:  # noqa: B027 - a keeper has no such work
        """Do the work that is due at ``now_s``."""

    def close(self) -> None:  # noqa: B027 - nor files that stay open
        """Release files and threads."""
