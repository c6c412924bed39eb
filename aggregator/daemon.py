"""The aggregator daemon: one loop that feeds a run's service from a broker, run after run."""

from __future__ import annotations

import logging
import queue
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aggregator.config import AggregatorConfig
from aggregator.membership import RUNS_DIRECTORY, AggregatorMembership
from aggregator.numerics.backend import select
from aggregator.owner_mail import OwnerMail
from aggregator.run_directory import read_generation, read_records
from aggregator.service import RunService
from aggregator.store import erase_updates
from aggregator.syncer import ThreadSyncer
from crypto.seal.signed import open_document
from support.files import remove_unfinished
from support.lean import settle
from support.locks import exclusive
from wire import limits
from wire.address import BrokerAddress
from wire.codec import decode
from wire.documents import RunPackage, RunPlan
from wire.errors import ShoalError, UntrustedError
from wire.mqtt import MqttTransport
from wire.transport import Message, TakenOver, TransportEvent

LOG = logging.getLogger("shoal.aggregator")
POLL_S: Final = 0.25
"""How often deadlines, stalled transfers and new run files are looked for when nothing arrives."""
TAKE_OVER_S: Final = 5.0
"""How long a program that is being replaced may take to end."""
BATCH_EVENTS: Final = 512
"""Most events between two group commits."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """A run that the owner signed, as it lies in the runs directory."""

    path: Path
    plan: RunPlan
    package: bytes


class _Stop(Exception):  # noqa: N818 - a wish, not a fault
    """SIGTERM or SIGINT: end cleanly."""


def find_runs(membership: AggregatorMembership) -> list[RunFile]:
    """Return the owner's runs by number; a file that is not the owner's is logged and left alone."""
    found = []
    for path in sorted((membership.directory / RUNS_DIRECTORY).glob("*.run")):
        try:
            package = path.read_bytes()
            plan = open_document(decode(package, RunPackage).plan, RunPlan, membership.owner_key)
            if plan.fleet != membership.fleet:
                raise UntrustedError(f"a run of fleet {plan.fleet!r}")
        except ShoalError as error:
            LOG.warning("run file refused", extra={"kv": {"file": path.name, "reason": str(error)}})
            continue
        found.append(RunFile(path, plan, package))
    return sorted(found, key=lambda r: r.plan.run)


def is_finished(membership: AggregatorMembership, run: int) -> bool:
    """Whether the final round of ``run`` is recorded."""
    records = read_records(membership.directory / f"run-{run:06d}")
    return bool(records) and bool(records[-1]["final"])


def serve(config: AggregatorConfig) -> None:
    """Serve the fleet from ``config.dir``, alone, until stopped, or with ``once`` until every run is finished.

    Raises:
        NotEnrolledError: this aggregator belongs to no fleet.
        BrokerUnreachableError: the first connection failed.
        ConfigError: another program serves this directory.
        UntrustedError: another aggregator uses the same client id.
    """
    if not config.dir.is_dir():
        AggregatorMembership(config.dir)  # says what is missing
    with exclusive(
        config.dir, wait_s=TAKE_OVER_S, hint="one `shoal-aggregator serve` serves a fleet; end the other first"
    ):
        remove_unfinished(config.dir)
        Daemon(config).serve()


class Daemon:
    """Serves the runs of one fleet in order."""

    def __init__(self, config: AggregatorConfig) -> None:
        self._config = config
        self._membership = AggregatorMembership(config.dir)
        self._mail = OwnerMail(self._membership)
        self._held_back = ""
        self._said: set[str] = set()
        self._events: queue.SimpleQueue[TransportEvent | Callable[[], None] | None] = queue.SimpleQueue()
        address = BrokerAddress.parse(
            config.broker or self._membership.broker, ca_file=config.ca, cert_file=config.cert, key_file=config.key
        )
        self._transport = MqttTransport(
            address,
            f"shoal-{self._membership.fleet}-aggregator",
            self._events.put,
            session_expiry_s=limits.SESSION_EXPIRY_AGGREGATOR_S,
            max_queued_bytes=limits.MAX_PENDING_BYTES,
        )

    def serve(self) -> None:
        """Run until stopped, or with ``once`` until every run is finished.

        Raises:
            BrokerUnreachableError: the first connection failed.
            UntrustedError: another aggregator uses the same client id.
        """
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self._events.put(None))
        self._mail.subscribe(self._transport)
        self._transport.start(require=True)
        LOG.info(
            "serving",
            extra={"kv": {"fleet": self._membership.fleet, "devices": len(self._membership.roster.active())}},
        )
        told_idle = False
        try:
            while True:
                run = self._next_run()
                if run is not None:
                    told_idle = False
                    self._serve_run(run)
                elif self._config.once and not self._held_back:
                    return
                else:
                    if not told_idle and not self._held_back:
                        LOG.info("idle: waiting for a run file in %s", self._membership.directory / RUNS_DIRECTORY)
                    told_idle = True
                    self._take(None)
        except _Stop:
            LOG.info("stopping")
        finally:
            self._transport.close()

    def _next_run(self) -> RunFile | None:
        self._reload_roster()
        for run in find_runs(self._membership):
            if is_finished(self._membership, run.plan.run):
                erase_updates(self._membership.directory / f"run-{run.plan.run:06d}")
                continue
            try:
                directory = self._membership.directory / f"run-{run.plan.run:06d}"
                obstacle = self._membership.obstacle(run.plan, read_generation(directory))
            except UntrustedError as error:
                self._say_once(f"passed over: {error}; {error.hint}")
                continue
            if obstacle:
                self._say_once(f"waiting for the owner's roster and keys: {obstacle}")
            self._held_back = obstacle
            return None if obstacle else run
        self._held_back = ""
        return None

    def _say_once(self, text: str) -> None:
        if text not in self._said:
            self._said.add(text)
            LOG.warning(text)

    def _reload_roster(self, service: RunService | None = None) -> None:
        """Look for a roster that was carried here by hand; one that is refused is no reason to end."""
        try:
            if service is None:
                self._membership.reload()
            else:
                service.reload_roster()
        except ShoalError as error:
            self._say_once(f"roster file refused: {error}")

    def _serve_run(self, run: RunFile) -> None:
        plan = run.plan
        work = 2.0 * len(self._membership.roster.active()) ** 2 * plan.length
        backend = select(self._config.device, work_flops=work)
        LOG.info(
            "run",
            extra={
                "kv": {
                    "run": plan.run,
                    "algorithm": plan.algorithm,
                    "rounds": plan.rounds,
                    "mode": plan.mode,
                    "d": plan.length,
                }
            },
        )
        syncer = ThreadSyncer(self._events.put)
        service = RunService(
            self._membership,
            plan,
            run.package,
            self._transport,
            self._membership.directory,
            backend=backend,
            syncer=syncer,
        )
        try:
            service.start(time.monotonic())
            settle()
            looked_s = time.monotonic()
            while not service.finished:
                self._take(service)
                if time.monotonic() - looked_s > 1.0:
                    looked_s = time.monotonic()
                    self._reload_roster(service)
        finally:
            syncer.close()
            service.close()
        LOG.info("run finished", extra={"kv": {"run": plan.run}})

    def _read_mail(self, message: Message) -> None:
        try:
            self._mail.take(message.topic, message.payload, time.monotonic())
        except ShoalError as error:
            LOG.warning("refused", extra={"kv": {"topic": message.topic, "reason": str(error)}})

    def _take(self, service: RunService | None) -> None:
        """Hand over everything that has arrived, waiting a little for the first; then commit, acknowledge, tick."""
        try:
            event = self._events.get(timeout=POLL_S)
            for _ in range(BATCH_EVENTS):
                if event is None:
                    raise _Stop
                if isinstance(event, TakenOver):
                    raise UntrustedError(
                        "another aggregator took over this session",
                        hint="a fleet has one aggregator: stop the other one",
                    )
                if callable(event):
                    if service is not None:
                        service.at(time.monotonic())
                    event()
                elif service is not None:
                    service.on_event(event, time.monotonic())
                elif isinstance(event, Message):
                    self._read_mail(event)
                event = self._events.get_nowait()
        except queue.Empty:
            pass
        if service is not None:
            service.flush(time.monotonic())
            service.tick(time.monotonic())
