"""The program of a keeper on a real broker."""

from __future__ import annotations

import time
from pathlib import Path

from aggregator.config import AggregatorConfig
from aggregator.keeper.memory import KeeperMemory
from aggregator.keeper.service import KeeperService
from aggregator.shards import membership
from aggregator.shards.helper import HelperDaemon
from aggregator.shards.membership import WorkerMembership
from shoal.errors import ShoalError
from shoal.membership.doctor import local_checks, membership_checks
from shoal.membership.grants import KEEPER_ROLE
from shoal.transport.base import TransportEvent
from shoal.util.console import Check, checked, ok
from shoal.util.files import serving


def init(directory: Path, name: str) -> Path:
    """Make a keeper's keys, its directory and its empty memory; return the path of the card for the owner."""
    card = membership.init(directory, name, KEEPER_ROLE)
    KeeperMemory().save(directory)
    return card


def diagnose(config: AggregatorConfig) -> list[Check]:
    """Return the checks of a keeper; its program may be running."""
    try:
        member = WorkerMembership(config.dir)
    except ShoalError as error:
        return [Check("membership", "failure", str(error), error.hint), *local_checks(config.dir)]
    return [
        ok("membership", f"keeper of fleet {member.fleet}"),
        *local_checks(config.dir),
        *membership_checks(member, "keeper", config),
        checked("memory", lambda: ok("memory", f"{len(KeeperMemory.load(config.dir).opened)} requests")),
    ]


class KeeperDaemon(HelperDaemon):
    """Drives a keeper."""

    def __init__(self, config: AggregatorConfig, directory: Path) -> None:
        super().__init__(config, directory)
        self._service = KeeperService(self.membership, self.transport, self.birth)

    def subscribe(self) -> None:
        """Subscribe to what a keeper reads."""
        self._service.subscribe()

    def handle(self, event: TransportEvent) -> None:
        """Hand an event to the service."""
        self._service.on_event(event, time.monotonic())


def serve(config: AggregatorConfig) -> None:
    """Serve a keeper until it is stopped.

    Raises:
        NotEnrolledError: the directory has not joined a fleet.
        IntegrityError: its memory is missing.
    """
    WorkerMembership(config.dir)  # before a file is written
    with serving(config.dir, hint="one program serves a keeper; end the other first"):
        KeeperDaemon(config, config.dir).serve()
