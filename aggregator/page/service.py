"""The fleet page as the daemon starts, feeds and ends it."""

from __future__ import annotations

import dataclasses
import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from aggregator.page.access import Access, Listen
from aggregator.page.feed import UPDATE_S, Feed
from aggregator.page.home_assistant import HomeAssistant
from aggregator.status.record import Facts
from aggregator.storage.signed_runs import directory_of
from shoal.errors import ConfigError, ShoalError, reason_of

if TYPE_CHECKING:
    from aggregator.config import AggregatorConfig
    from aggregator.membership import AggregatorMembership
    from aggregator.page.server import PageServer
    from aggregator.status.facts import LiveFacts
    from shoal.protocol.documents import RunPlan
    from shoal.transport.base import Transport

LOG = logging.getLogger("shoal.aggregator")


class FleetPage:
    """The HTTP server and Home Assistant's sensors, if they are configured; without both it does nothing.

    Args:
        config: the aggregator's configuration.
        membership: the aggregator's, which has the roster.
        transport: its connection to the broker.

    Raises:
        ConfigError: an address, token or prefix is wrong, the address is taken, or prometheus-client is missing.
    """

    def __init__(self, config: AggregatorConfig, membership: AggregatorMembership, transport: Transport) -> None:
        self._membership = membership
        self.feed = Feed(membership.fleet, membership.directory, lambda run: directory_of(membership, run))
        self._sensors = (
            HomeAssistant(transport, membership.fleet, config.home_assistant) if config.home_assistant else None
        )
        self.server = _server(config.http, config.http_token, self.feed) if config.http else None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None
        self._published_s = -math.inf

    def start(self) -> None:
        """Listen, and publish to Home Assistant, in threads of their own."""
        if self.server is not None:
            self.server.start()
            LOG.info("fleet page", extra={"kv": {"address": self.server.url}})
        if self._sensors is not None:
            self._thread = threading.Thread(target=self._publish_sensors, args=(self._sensors,), daemon=True)
            self._thread.start()

    def keep_up(self, facts: Callable[[], LiveFacts], plan: Callable[[], RunPlan | None], now_s: float) -> None:
        """Hand the facts over if that is due; called by the daemon's loop.

        Args:
            facts: returns the facts of the daemon.
            plan: returns the plan of the run that is served.
            now_s: monotonic seconds.
        """
        if (self.server is None and self._sensors is None) or now_s - self._published_s < UPDATE_S:
            return
        self._published_s = now_s
        roster, at_s = self._membership.roster, int(time.time())
        live = dataclasses.replace(facts(), alive_at_s=at_s)
        known = Facts(
            fleet=self._membership.fleet,
            running=True,
            live=live,
            broker=live.connection.broker,
            active=roster.active(),
            revoked=tuple(roster.revoked),
            now_s=at_s,
        )
        self.feed.publish(known, plan())

    def close(self) -> None:
        """End all threads."""
        self._ended.set()
        if self.server is not None:
            self.server.close()
        if self._thread is not None:
            self._thread.join()

    def _publish_sensors(self, sensors: HomeAssistant) -> None:
        failed = False
        while not self._ended.wait(UPDATE_S):
            try:
                snapshot = self.feed.current()
                if snapshot is not None and snapshot.status.connected:
                    sensors.publish(snapshot, time.monotonic())
                failed = False
            except ShoalError as error:
                if not failed:
                    LOG.warning(
                        "Home Assistant's sensors can't be published", extra={"kv": {"reason": reason_of(error)}}
                    )
                failed = True


def _server(address: str, token_file: Path | None, feed: Feed) -> PageServer:
    access = Access.load(Listen.parse(address), token_file)
    try:
        from aggregator.page.metrics import Metrics
        from aggregator.page.server import PageServer
    except ImportError as error:
        raise ConfigError(
            "the fleet page needs prometheus-client", hint="install it with: pip install 'shoal[aggregator]'"
        ) from error
    if not access.listen.is_loopback:
        LOG.warning(
            "the fleet page is open to other machines, without TLS",
            extra={
                "kv": {"address": str(access.listen), "hint": "a proxy with TLS in front, or ssh -L, hides the token"}
            },
        )
    return PageServer(access, feed, Metrics(feed))
