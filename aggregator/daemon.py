"""The aggregator daemon: one loop that passes the broker's messages to the service of the current run, run after run.

- Runs are served in the order of their numbers. A run that can't be served because of its file or directory is skipped.
- A run that waits for a newer roster or newer keys blocks the later ones, since devices take part in runs of rising numbers only.
- A paused run is served, so that its devices are answered, and blocks the later ones until the owner resumes or stops it.
- After the last run the service of the newest finished run stays open, so that late reminders are still answered.

Apart from their own work, the threads of the transport and of the run's workers only put items into the `Inbox`.
"""

from __future__ import annotations

import logging
import signal
import time
from collections.abc import Callable
from typing import Final

from aggregator.config import AggregatorConfig
from aggregator.inbound import PresenceInbox
from aggregator.membership import RUNS_DIRECTORY, TOLD_FILE, AggregatorMembership, FalseMessageError
from aggregator.numerics.backend import Backend, select
from aggregator.owner_inbox import OwnerInbox, check_place
from aggregator.owner_requests import OwnerRequests
from aggregator.page.server import FleetPage
from aggregator.publisher import LEDGER_FILE, NoticeBoard, Publisher
from aggregator.run_control import RunControl
from aggregator.run_service import RunService
from aggregator.shards.calculation import JobLink
from aggregator.shards.coordinator import WorkerMessages
from aggregator.shards.membership import witness
from aggregator.status.facts import RunStatus
from aggregator.status.live_file import LiveFile, known_devices
from aggregator.status.text import service_line
from aggregator.status.watch import FleetWatch
from aggregator.storage.signed_runs import (
    OwnerOrders,
    RunFile,
    RunFiles,
    check_assignment,
    directory_of,
    is_void,
    log_refused,
)
from aggregator.storage.store import disk_errors, erase_updates, read_key_version, read_last_record, readable
from aggregator.strategies.registry import TooManyComparedError
from aggregator.workers import RunWorkers
from shoal import limits
from shoal.address import BrokerAddress
from shoal.errors import ConfigError, IntegrityError, ShoalError, TakenOverError, UntrustedError, WireError
from shoal.membership.roster_changes import ReplacedError
from shoal.protocol.documents import RunPlan
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Connected, Message, TakenOver
from shoal.transport.inbox import Inbox, Item
from shoal.transport.mqtt import MqttTransport
from shoal.transport.probe import own_expiries
from shoal.util.files import serving
from shoal.util.log_throttle import Refusals
from shoal.util.process import settle
from shoal.util.server_process import keep_heap, raise_open_files_limit, usable_cores
from shoal.util.service_manager import ServiceManager

LOG = logging.getLogger("shoal.aggregator")
POLL_S: Final = 0.25
"""Interval at which deadlines, stalled transfers and new run files are checked when no message arrives."""
LOOK_AFTER_S: Final = 1.0
"""Interval at which the loop checks for a roster file copied here, and that the file of the current run still exists."""
OPEN_FILES_NEEDED: Final = 64
"""Largest number of files that the daemon opens, for any size of roster: connection, database, round files, mappings."""
LAST_ANSWERS_S: Final = 15.0
"""How long ``once`` continues after the last run for devices whose upload is not acknowledged: they send reminders with
growing pauses. An aggregator that was restarted does not know which were acknowledged, and always waits this long."""


class _Stop(Exception):  # noqa: N818 - a request to end, not an error
    """Raised in the loop after SIGTERM or SIGINT, to end cleanly."""


def serve(config: AggregatorConfig) -> None:
    """Serve the fleet of ``config.dir`` until stopped, or with ``once`` until every run is finished.

    Raises:
        NotEnrolledError: this aggregator belongs to no fleet.
        BrokerUnreachableError: the first connection failed.
        ConfigError: another program serves this directory.
        TakenOverError: another aggregator with this identity began before this one.
        StorageError: the disk is full or fails.
    """
    AggregatorMembership(config.dir)  # fail before `serving` makes a lock file in a directory of something else
    with serving(config.dir, hint="one `shoal-aggregator serve` serves a fleet; end the other first"):
        keep_heap()
        too_few = raise_open_files_limit(OPEN_FILES_NEEDED)
        if too_few:
            LOG.warning(too_few, extra={"kv": {"hint": "raise LimitNOFILE of its service, or ulimit -n"}})
        with disk_errors(config.dir):
            Daemon(config).serve()


class Daemon:
    """Serves the runs of one fleet in order of their numbers.

    Args:
        config: the aggregator's configuration.
    """

    def __init__(self, config: AggregatorConfig) -> None:
        self._config = config
        self._membership = AggregatorMembership(config.dir)
        self._mail = OwnerInbox(self._membership)
        self._runs = RunFiles(self._membership, self._refuse_once)
        self._held_back = ""
        self._damage: IntegrityError | None = None
        self._over: RunFile | None = None
        self._service: RunService | None = None
        self._workers: RunWorkers | None = None
        self._end_s: float | None = None
        self._unreadable = b""
        self._said: set[str] = set()
        self._erased: set[bytes] = set()
        self._refusals = Refusals(LOG)
        self._inbox = Inbox()
        self._address = address = BrokerAddress.of(config, self._membership.grant)
        topic = Topics(self._membership.fleet).at(TopicKind.SERVER_STATE)
        self._transport = MqttTransport(
            address,
            # One client id for a fleet, so that a second aggregator takes over the session and both notice.
            f"shoal-{self._membership.fleet}-aggregator",
            self._inbox.put,
            session_expiry_s=limits.SESSION_EXPIRY_AGGREGATOR_S,
            # After a crash the broker sends again whatever was not handled yet.
            manual_ack=True,
            max_queued_bytes=limits.MAX_PENDING_BYTES,
            witness=witness(self._membership.identity, self._membership.fleet, topic, time.time_ns()),
        )
        self._watch = FleetWatch(str(address), known=known_devices(self._membership.directory))
        if address.tls:
            self._watch.connection.expires(own_expiries(address))
        self._presences = PresenceInbox(self._membership, self._watch)
        self._live = LiveFile(self._membership.directory, self._watch)
        self._orders = OwnerOrders(self._membership.directory)
        self._control = RunControl(
            self._membership, self._orders, lambda: self._service, self._refresh_status, self._watch
        )
        self._requests = OwnerRequests(self._membership, self._transport, self._orders, self._control)
        self._notices = NoticeBoard(self._membership, self._transport, self._orders)
        self._ended: set[bytes] = set()
        self._order_due_s = 0.0
        self._page = FleetPage(config, self._membership, self._transport)
        self._manager = ServiceManager.from_environment()

    def serve(self) -> None:
        """Run until stopped, or with ``once`` until every run is finished.

        Reminders of a finished run are answered until the next run begins, since its last uploads may arrive late.

        Raises:
            BrokerUnreachableError: the first connection failed.
            TakenOverError: another aggregator with this identity began before this one.
            ReplacedError: the owner has put another aggregator in the place of this one.
            IntegrityError: with ``once``, a run was skipped because its directory is damaged.
        """
        try:
            self._serve()
        except Exception as error:
            self._live.end(error)
            raise
        finally:
            self._manager.stopping()
            self._page.close()
        self._live.end(None)

    def _serve(self) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            # The handler only queues the request: an exception raised in it could cut a commit short.
            signal.signal(number, lambda *_: self._inbox.put(None))
        self._page.start()
        self._keep_status()
        self._mail.subscribe(self._transport)
        self._requests.subscribe()
        self._presences.subscribe(self._transport)
        if (self._membership.directory / TOLD_FILE).exists():
            # Before anything is published, or the session of another aggregator is taken over: our disk may be an old one.
            check_place(self._membership, self._address)
        self._transport.start(require=True)
        self._introduce()
        LOG.info(
            "serving",
            extra={"kv": {"fleet": self._membership.fleet, "devices": len(self._membership.roster.active())}},
        )
        self._manager.ready(f"connected to {self._watch.connection.facts.broker}")
        told_idle = False
        try:
            while True:
                run = self._next_run()
                if run is not None:
                    told_idle = False
                    self._serve_run(run)
                    continue
                if self._begins_next():
                    continue
                self._look_back()
                if self._config.once and self._may_end():
                    if self._damage is not None:
                        raise self._damage
                    if not self._runs.all():
                        LOG.info("nothing to do: no run file in %s", self._membership.directory / RUNS_DIRECTORY)
                    return
                if not told_idle and not self._held_back and not self._config.once:
                    LOG.info(
                        "idle: waiting for `shoal-fleet run start`, or a run file in %s",
                        self._membership.directory / RUNS_DIRECTORY,
                    )
                told_idle = True
                self._take(self._service)
        except _Stop:
            LOG.info("stopping")
        finally:
            self._let_go()
            self._requests.close()
            self._transport.close()

    def _begins_next(self) -> bool:
        """Begin the next run of the owner's standing order if it is due; return whether there is a new run."""
        now_s = time.monotonic()
        if self._held_back or now_s < self._order_due_s:
            return False
        self._order_due_s = now_s + LOOK_AFTER_S
        try:
            return self._control.standing.begin_next()
        except (UntrustedError, IntegrityError, WireError) as error:
            self._say_once(f"the standing order can't go on: {error}", hint=error.hint)
            return False

    def _introduce(self) -> None:
        """Publish the roster at this aggregator's first start: devices that knew another one must not wait for the next run."""
        if not (self._membership.directory / TOLD_FILE).exists():
            m = self._membership
            Publisher(m.identity, m.group, self._transport, m.directory / LEDGER_FILE).roster(m.roster_bytes, m.roster)

    def _next_run(self) -> RunFile | None:
        self._reload_roster()
        self._damage = self._over = None
        for run in self._runs.all():
            directory = directory_of(self._membership, run.plan.run)
            try:
                if self._runs.is_over(run.plan):
                    self._over = run
                    # A crash between the final record and the erasure leaves updates on the disk.
                    if run.plan.run_id not in self._erased:
                        erase_updates(directory)
                        self._erased.add(run.plan.run_id)
                    continue
                if run.plan.run_id in self._ended or is_void(
                    self._membership, run.plan, self._orders.of(run.plan.run_id)
                ):
                    continue
                check_assignment(self._membership, run.plan)
                reason = self._membership.reason(run.plan, read_key_version(directory))
            except (UntrustedError, IntegrityError, TooManyComparedError) as error:
                self._pass_over(error)
                continue
            if reason:
                self._say_once(
                    f"waiting for the owner's roster and keys: {reason}",
                    hint="shoal-fleet publish FLEET_DIR, or copy FLEET_DIR/roster.signed into this directory",
                )
            self._held_back = reason
            # No later run instead: devices refuse a run whose number is below one that they have joined.
            return None if reason else run
        self._held_back = ""
        return None

    def _pass_over(self, error: ShoalError) -> None:
        """Log that a run is skipped, once for each reason."""
        if isinstance(error, IntegrityError):
            self._damage = error
        self._say_once(f"passed over: {error}", hint=error.hint)

    def _refuse_once(self, name: str, reason: str) -> None:
        if f"{name}: {reason}" not in self._said:
            self._said.add(f"{name}: {reason}")
            log_refused(name, reason)

    def _say_once(self, text: str, *, hint: str = "") -> None:
        if text not in self._said:
            self._said.add(text)
            LOG.warning(text, extra={"kv": {"hint": hint} if hint else {}})

    def _reload_roster(self) -> None:
        """Put a roster file that was copied here in force if it is newer; log a refused one and continue."""
        try:
            if self._service is None:
                self._membership.reload()
            else:
                self._service.reload_roster()
        except ReplacedError:
            raise
        except ShoalError as error:
            self._say_once(f"roster file refused: {error}", hint=error.hint)

    def _look_back(self) -> None:
        """Open the newest finished run again to answer reminders, unless a run is open or its directory is unreadable."""
        over = self._over
        if self._service is not None or over is None or over.plan.run_id == self._unreadable:
            return
        try:
            with readable(directory_of(self._membership, over.plan.run)):
                self._begin(over, self._runs.package(over), None)
        except ShoalError as error:
            self._let_go()
            if isinstance(error, IntegrityError):
                self._unreadable = over.plan.run_id
            self._say_once(f"uploads to run {over.plan.run} can't be acknowledged: {error}", hint=error.hint)

    def _may_end(self) -> bool:
        """Whether no run is left and every upload to the last one is acknowledged, or the time for reminders is over."""
        if self._held_back:
            return False
        if self._service is None or self._service.uploads.answers.complete:
            return True
        if self._end_s is None:
            self._end_s = time.monotonic() + LAST_ANSWERS_S
        return time.monotonic() >= self._end_s

    def _let_go(self) -> None:
        """Close the service of the current run and its workers."""
        if self._workers is not None:
            self._workers.close()
        if self._service is not None:
            self._service.close()
        self._service = self._workers = None
        self._live.hurry()

    def _begin(self, run: RunFile, package: bytes, backend: Backend | None) -> RunService:
        """Close the service of the previous run and start one for ``run``."""
        self._let_go()
        self._end_s = None
        self._workers = RunWorkers.threads(self._inbox.put, usable_cores())
        self._service = RunService(
            self._membership,
            run.plan,
            package,
            self._transport,
            self._membership.directory,
            backend=backend,
            workers=self._workers,
            watch=self._watch,
            order=self._orders.of(run.plan.run_id),
            link=self._link(run.plan) if run.plan.workers else None,
        )
        self._service.start(time.monotonic())
        self._live.hurry()
        return self._service

    def _link(self, plan: RunPlan) -> Callable[[WorkerMessages], JobLink]:
        """Return what makes the link to the workers of a run.

        Raises:
            ConfigError: no network interface is named.
        """
        from aggregator.shards.sums import DistributedLink

        if not self._config.interface:
            raise ConfigError(
                f"run {plan.run} has {len(plan.workers)} workers: the coordinator needs a network interface for their sums",
                hint="give --interface, such as lo or wg0",
            )
        return lambda messages: DistributedLink(messages, len(plan.workers), self._config.interface)

    def _serve_run(self, run: RunFile) -> None:
        """Serve a run to its end, or until its file is removed."""
        try:
            package = self._runs.package(run)
        except ShoalError as error:
            self._pass_over(error)
            return
        plan = run.plan
        facts = {
            "algorithm": plan.recipe.algorithm,
            "rounds": plan.recipe.rounds,
            "mode": plan.recipe.mode,
            "d": plan.length,
        }
        LOG.info("run", extra={"kv": {"run": plan.run, **facts}})
        work = 2.0 * self._membership.roster.only(plan.recipe.only).active_count ** 2 * plan.length
        service = self._begin(run, package, select(self._config.device, work_flops=work))
        del package  # with the origins it may be as large as a model
        # Only now do the run's long-lived objects exist, which garbage collection then skips.
        settle()
        looked_s = time.monotonic()
        while not service.finished:
            self._take(service)
            if time.monotonic() - looked_s > LOOK_AFTER_S:
                looked_s = time.monotonic()
                self._reload_roster()
                if service.odd and self._orders.of(plan.run_id).stops:
                    run.path.unlink(missing_ok=True)
                if not run.path.exists():
                    LOG.warning(
                        "run stopped: its file was taken away",
                        extra={"kv": {"run": plan.run, "hint": "put it back to go on, unless a later run has begun"}},
                    )
                    self._let_go()
                    return
        last = read_last_record(directory_of(self._membership, plan.run))
        if last is None or not last["final"]:
            self._ended.add(plan.run_id)  # stopped before its first round: there is nothing to answer for
            self._let_go()
            return
        # A device that declined the final round sends no upload, so it waits for no answer.
        service.uploads.answers.end(last["round"], set(last["missing"]) - set(last.get("declined", ())))
        LOG.info("run finished", extra={"kv": {"run": plan.run}})

    def _read_mail(self, message: Message) -> None:
        try:
            if not self._mail.take(message.topic, message.payload, time.monotonic()):
                self._presences.take(message, time.monotonic())
        except ReplacedError:
            raise
        except ShoalError as error:
            if isinstance(error, FalseMessageError):
                self._watch.devices.refused(error.device, str(error))
            self._refusals.tell(message.topic, error, time.monotonic())

    def _take(self, service: RunService | None) -> None:
        """Handle a batch of queued events, waiting at most POLL_S for the first; then commit, acknowledge and tick."""
        for event in self._inbox.batch(POLL_S):
            self._handle(event, service)
        if service is not None:
            service.flush(time.monotonic())
            service.tick(time.monotonic())
        self._keep_status()

    def _keep_status(self) -> None:
        """Hand the facts to `status`, the devices, the fleet page and the service manager, where that is due."""
        service = self._service
        self._notices.keep_up(None if service is None or service.finished else service.plan)
        self._watch.connection.sends(self._transport.chunk_bytes)
        self._live.keep_up(self._run_facts, time.monotonic())
        now_s = time.monotonic()
        self._manager.alive(now_s)
        if self._manager.wants_status(now_s):
            self._manager.status(service_line(self._live.facts(self._run_facts())), now_s)
        self._page.keep_up(
            lambda: self._live.facts(self._run_facts()), lambda: None if service is None else service.plan, now_s
        )

    def _run_facts(self) -> RunStatus | None:
        return None if self._service is None else self._service.facts()

    def _refresh_status(self) -> None:
        """Write the facts now, for the answer to a request."""
        self._live.hurry()
        self._keep_status()

    def _take_request(self, message: Message) -> bool:
        """Handle a message if it is the owner's request; return whether it is."""
        try:
            return self._requests.take(message.topic, message.payload, time.monotonic())
        except ShoalError as error:
            self._refusals.tell(message.topic, error, time.monotonic())
            return True

    def _handle(self, event: Item, service: RunService | None) -> None:
        if event is None:
            raise _Stop
        if isinstance(event, TakenOver):
            raise TakenOverError(
                "another aggregator took over this session: it has this one's identity, and began before it",
                hint="a fleet has one aggregator: end the other one, or this copy of its directory",
            )
        if callable(event):
            # The result of a worker's job. It is taken here because the service is not safe for several threads.
            if service is not None:
                service.at(time.monotonic())
            event()
            return
        if isinstance(event, Message) and self._take_request(event):
            self._control.apply(time.monotonic())
            self._live.hurry()
            return
        if not isinstance(event, Message):
            self._notices.on_event(event)
            self._live.hurry()
        if service is not None:
            service.on_event(event, time.monotonic())
        elif isinstance(event, Message):
            self._read_mail(event)
        else:
            self._watch.connection.on_event(event)
            if isinstance(event, Connected):
                self._presences.subscribe(self._transport)
