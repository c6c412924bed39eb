"""A whole fleet in this process, on virtual time: the real keys, messages, rules and files, without sockets and threads.

One loop drives the directories that `shoal.simulation.process_fleet.Stage` makes: an in-memory broker, the aggregator's run
service, and for every device its runtime with an inline worker. The same calls with the same seeds give the same run, so a
scenario (a lost chunk, a crash between two writes) can be replayed exactly.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from aggregator.inbound import PresenceInbox
from aggregator.keeper.service import KeeperService
from aggregator.membership import AggregatorMembership
from aggregator.numerics.backend import Backend
from aggregator.owner_requests import OwnerRequests
from aggregator.publisher import LEDGER_FILE, NoticeBoard, Publisher
from aggregator.run_control import RunControl
from aggregator.run_service import RunService
from aggregator.shards.membership import WorkerMembership, presence_of
from aggregator.shards.worker import LocalLink, WorkerService
from aggregator.status.watch import FleetWatch
from aggregator.storage.signed_runs import OwnerOrders, RunFiles
from edge_client.config import EdgeConfig
from edge_client.daemon import next_birth
from edge_client.learning.data import Dataset
from edge_client.learning.executor.choice import AUTO
from edge_client.learning.worker import Cancel, run_job
from edge_client.membership import DeviceMembership
from edge_client.protocol.presence import presence
from edge_client.runtime import DeviceRuntime
from edge_client.storage.state import DeviceState, OwnModel
from shoal.errors import DataError, ShoalError, UsageError
from shoal.owner.console.asking import Question
from shoal.owner.enrolment.admission import Registrar
from shoal.owner.runs.plan import origins_needed
from shoal.protocol.documents import Schedule
from shoal.protocol.recipe import Recipe
from shoal.protocol.requests import RequestAction
from shoal.simulation.closing import Closing
from shoal.simulation.process_fleet import Stage
from shoal.task.bundle import TaskBundle
from shoal.task.manifest import PRIVATE, TaskManifest
from shoal.transport.base import Message, Sink, TransportEvent, Will
from shoal.util.log_throttle import Refusals
from shoal_lab.loopback.transport import Faults, LoopbackBroker, LoopbackTransport

LOG = logging.getLogger("shoal.aggregator")
BROKER_URL: Final = "mqtt://loopback"
"""Address in the grants; it is never connected to."""
EPOCH_S: Final = 1_800_000_000
"""Unix time at which a fleet with a standing order begins."""
REST_S: Final = 3600.0
"""Step of virtual time while a standing order waits for its next run."""
POLL_S: Final = 0.25
"""Longest step of virtual time between two checks of deadlines and timers."""


class LoopbackError(ShoalError):
    """A loopback fleet did not reach the expected state within its virtual time."""


T = TypeVar("T")


class InlineWorker:
    """Runs jobs in the driver's thread when it calls `work`; for the loopback fleet."""

    def __init__(self) -> None:
        self._waiting: tuple[Callable[[Cancel], Any], Callable[[Any], None]] | None = None

    def submit(self, job: Callable[[Cancel], T], done: Callable[[T | ShoalError], None]) -> None:
        """Hold ``job`` until `work` is called."""
        self._waiting = (job, done)

    def cancel(self) -> None:
        """Drop the waiting job."""
        self._waiting = None

    close = cancel

    def work(self) -> bool:
        """Run the waiting job, if there is one; return whether there was."""
        if self._waiting is None:
            return False
        (job, done), self._waiting = self._waiting, None
        run_job(job, lambda: False, done)
        return True


@dataclass(frozen=True, slots=True)
class LoopbackDevice:
    """The state of a running device that a crash loses."""

    runtime: DeviceRuntime
    transport: LoopbackTransport
    worker: InlineWorker
    finish_worker: InlineWorker


class LoopbackFleet(Closing):
    """One run of one fleet, from the owner's signature to the devices' final models.

    Args:
        root: an empty directory, in which owner, aggregator and devices get their directories.
        bundle: the task.
        data: every device's samples by its name, in the task's dtypes; devices join in the order of their names.
        options: the run's options.
        faults: network faults; may also be set later, as ``fleet.broker.faults``.
        origins: shape (origins, d), float32, the starting models; drawn by `draw_origins` if None.
        backend: computes similarities; numpy if None.
        stage: directories that hold owner, aggregator and devices already; made in ``root`` if None.
        personal: weight of Ditto's proximal term in the devices' personal finish; 0 leaves that candidate out.
        executors: device -> auto, onnxruntime or numpy; auto for those that are missing.
        trainers: device -> its settings for own training code.
        shards: workers of the aggregator; 1 is an aggregator without workers.
        schedule: makes the run the first one of a standing order; clocks show virtual time then, from EPOCH_S on.
        keeper: name of the run's keeper; empty for none.

    Attributes:
        stage: the directories; ``stage.fleet`` is the owner's.
        broker: the network, and the clock: ``broker.now_s``.
        plan: the signed run plan.
        service: the aggregator; None while it is killed.
        devices: the running devices by name.
        workers: the running workers of the aggregator by name.
        keeper: the running keeper; None if there is none.
    """

    def __init__(
        self,
        root: Path,
        bundle: TaskBundle,
        data: Mapping[str, Dataset],
        options: Recipe,
        faults: Faults | None = None,
        *,
        origins: NDArray[np.float32] | None = None,
        backend: Backend | None = None,
        stage: Stage | None = None,
        personal: float = 0.0,
        executors: Mapping[str, str] | None = None,
        trainers: Mapping[str, Mapping[str, Any]] | None = None,
        shards: int = 1,
        schedule: Schedule | None = None,
        keeper: str = "",
    ) -> None:
        self.stage = stage or Stage(root, BROKER_URL, tuple(sorted(data)), shards=shards, keeper=keeper)
        self.broker = LoopbackBroker(faults)
        self.bundle = bundle
        self._data = dict(data)
        self._backend = backend
        self._personal = personal
        self._executors = dict(executors or {})
        self._trainers = dict(trainers or {})
        if origins is None:
            # Plan and origins share a seed here, so that runs are repeatable. No real fleet may do so: the aggregator
            # reads the plan's seed.
            origins = draw_origins(bundle.manifest, origins_needed(options), options.seed or 0)
        self.plan = self.stage.add_run(bundle, origins, options, schedule)
        self._clock = time.time if schedule is None else lambda: EPOCH_S + self.now_s
        self._watch = FleetWatch(clock=self._clock)
        self.service: RunService | None = None
        self.devices: dict[str, LoopbackDevice] = {}
        self._lives: dict[str, LoopbackTransport] = {}
        self.workers: dict[str, WorkerService] = {}
        self.keeper: KeeperService | None = None
        self.revive_aggregator()
        if self.stage.keeper:
            self.revive_keeper()
        for name in self.stage.workers:
            self.revive_worker(name)
        for name in self.stage.devices:
            self.revive_device(name)

    @property
    def now_s(self) -> float:
        """Virtual seconds since the fleet was made."""
        return self.broker.now_s

    @property
    def finished(self) -> bool:
        """Whether the run's final round is closed."""
        return self.service is not None and self.service.finished

    def client_id(self, name: str) -> str:
        """Return the MQTT client id of a device, or of ``aggregator``."""
        return f"shoal-{self.plan.fleet}-{name}"

    def records(self) -> list[dict[str, Any]]:
        """Return the closed rounds, as the aggregator stored them."""
        return self.stage.records(self.plan.run)

    def closed(self) -> int:
        """Return the number of the last closed round, as `records` has it; 0 before the first."""
        return self.stage.closed(self.plan.run)

    def model(self, name: str) -> OwnModel:
        """Return the newest model that the device has written to disk."""
        return DeviceState(self.stage.device_dir(name)).load_model()

    def step(self) -> bool:
        """Do everything that is due now, or advance the time if nothing is; return whether anything happened.

        A step delivers messages, runs one job of each device, and commits and acknowledges the uploads that reached the
        aggregator.
        """
        if self._act():
            return True
        due_s = self.broker.next_due_s()
        wait_s = POLL_S if due_s is None else min(POLL_S, due_s - self.now_s)
        self.broker.advance(wait_s)
        for one in self._living():
            one.tick(self.now_s)
        return False

    def _act(self) -> bool:
        moved = self.broker.pump() > 0
        for device in tuple(self.devices.values()):
            moved = device.worker.work() or moved
        moved = self.broker.pump() > 0 or moved
        for worker in tuple(self.workers.values()):
            worker.flush(self.now_s)
        moved = self.broker.pump() > 0 or moved
        if self.service is not None:
            self.service.flush(self.now_s)
            self._notices.keep_up(None if self.service.finished else self.service.plan)
        return self.broker.pump() > 0 or moved

    def settle(self) -> None:
        """Do everything that is due without advancing the time."""
        while self._act():
            pass

    def run(self, max_virtual_s: float) -> list[dict[str, Any]]:
        """Step to the end of the run and return its records.

        Raises:
            LoopbackError: the run is not finished after ``max_virtual_s`` virtual seconds.
        """
        self.run_until(lambda: self.finished, max_virtual_s)
        self.settle()
        return self.records()

    def rest_until_next(self, max_virtual_s: float) -> None:
        """Let time pass until the aggregator begins the next run of the standing order, and serve that.

        Raises:
            LoopbackError: none has begun after ``max_virtual_s`` virtual seconds.
        """
        self.run_until(lambda: self.standing.begin_next(), max_virtual_s, lambda: self.rest(REST_S))  # noqa: PLW0108
        self.serve_newest()

    def serve_newest(self) -> None:
        """Let the aggregator serve the newest of its run files."""
        if self.service is not None:
            self.kill_aggregator()
        else:
            self._cut("aggregator")
        self.plan = RunFiles(AggregatorMembership(self.stage.aggregator_dir)).all()[-1].plan
        self.revive_aggregator()

    def rest(self, seconds: float) -> None:
        """Let time pass in one step, in which nothing is sent but what is due at its end."""
        self.settle()
        self.broker.advance(seconds)
        self.step()

    def run_until(
        self, reached: Callable[[], bool], max_virtual_s: float, step: Callable[[], Any] | None = None
    ) -> None:
        """Step until ``reached()`` is true, by ``step`` if it is given.

        Raises:
            LoopbackError: it is still false after ``max_virtual_s`` virtual seconds.
        """
        end_s = self.now_s + max_virtual_s
        while not reached():
            if self.now_s >= end_s:
                dead = "the aggregator is dead"
                doing = self.standing.entry() if step else self.service.status() if self.service is not None else dead
                raise LoopbackError(f"not there after {max_virtual_s:g} virtual seconds; {doing}")
            (step or self.step)()

    def kill_device(self, name: str) -> None:
        """Kill a device as a power cut does: its connection breaks, its will is published, and only its files remain."""
        del self.devices[name]
        self._cut(name)

    def revive_device(self, name: str, batch: Dataset | None = None) -> None:
        """Start a device from its directory.

        Args:
            name: the device's name.
            batch: its new data; None leaves its data unchanged.

        Raises:
            UsageError: the device is running.
        """
        if name in self.devices:
            raise UsageError(f"{name} is alive")
        if batch is not None:
            self._data[name] = batch
        membership = DeviceMembership(self.stage.device_dir(name))
        birth = next_birth(membership)
        # The time is part of the seed, so that a revived device draws other pauses than before.
        worker, finish_worker = InlineWorker(), InlineWorker()
        random = Random(f"{self.plan.seed}/{name}/{self.now_s}")  # noqa: S311 - jitter
        will = presence(membership, birth, online=False)
        transport = self._connect(name, lambda event: runtime.on_event(event, self.now_s), will)
        config = EdgeConfig(
            membership.directory,
            data=membership.directory,  # not read: the samples are in memory
            executor=self._executors.get(name, AUTO),
            personal=f"{self._personal}" if self._personal else "on",
            **self._trainers.get(name, {}),
        )
        runtime = DeviceRuntime(
            config,
            membership,
            transport,
            worker,
            birth=birth,
            results=lambda callback: callback(),
            uniform=random.random,
            samples=lambda manifest: self._samples(name, manifest),
            finish_worker=finish_worker,
            clock_s=self._clock,
        )
        self.devices[name] = LoopbackDevice(runtime, transport, worker, finish_worker)
        runtime.start()
        transport.start()

    def add_device(self, name: str, batch: Dataset) -> None:
        """Add a new device to the roster during the run, and start it; new keys, if any are drawn, go to all members."""
        before = self.stage.fleet.roster.keys_since
        self.stage.add_device(name)
        if self.service is not None:
            self.service.reload_roster()
        if self.stage.fleet.roster.keys_since != before:
            self.publish()
        self.revive_device(name, batch)

    def publish(self) -> None:
        """Let the owner connect, read the retained messages, and publish roster and keys."""
        transport = LoopbackTransport(self.broker, "owner", lambda event: registrar.on_event(event, int(time.time())))
        registrar = Registrar(self.stage.fleet, transport)
        registrar.start(int(time.time()))
        transport.start()
        self.broker.pump()
        registrar.publish_roster()
        registrar.publish_keys()
        self.broker.pump()

    def kill_aggregator(self) -> None:
        """Kill the aggregator as a crash does: everything that it had not committed is lost.

        Raises:
            UsageError: the aggregator is not running.
        """
        if self.service is None:
            raise UsageError("the aggregator is dead")
        service, self.service = self.service, None
        service.close()
        self._cut("aggregator")

    def kill_keeper(self) -> None:
        """Kill the keeper as a crash does."""
        self.keeper = None
        self._cut(self.stage.keeper)

    def revive_keeper(self) -> None:
        """Start the keeper from its directory."""
        membership, birth = WorkerMembership(self.stage.keeper_dir), time.time_ns()
        will = presence_of(membership, birth, online=False)
        transport = self._connect(self.stage.keeper, lambda event: keeper.on_event(event, self.now_s), will)
        self.keeper = keeper = KeeperService(membership, transport, birth)
        keeper.start()
        transport.start()

    def revive_worker(self, name: str) -> None:
        """Start a worker of the aggregator from its directory.

        Raises:
            UsageError: the worker is running.
        """
        if name in self.workers:
            raise UsageError(f"{name} is alive")
        membership, birth = WorkerMembership(self.stage.worker_dir(name)), time.time_ns()
        will = presence_of(membership, birth, online=False)
        transport = self._connect(name, lambda event: worker.on_event(event, self.now_s), will)
        worker = WorkerService(membership, self.plan, transport, membership.directory, birth=birth)
        self.workers[name] = worker
        worker.start(self.now_s)
        transport.start()

    def revive_aggregator(self) -> None:
        """Start the aggregator from its directory; it resumes the run from its store.

        Raises:
            UsageError: the aggregator is running.
        """
        if self.service is not None:
            raise UsageError("the aggregator is alive")
        runs = RunFiles(AggregatorMembership(self.stage.aggregator_dir))
        run = next(r for r in runs.all() if r.plan.run == self.plan.run)

        def sink(event: TransportEvent) -> None:
            if self._is_request(event):
                self._control.apply(self.now_s)
                return
            self._notices.on_event(event)
            service.on_event(event, self.now_s)

        membership, transport, orders = self._serve(sink)
        service = RunService(
            membership,
            run.plan,
            runs.package(run),
            transport,
            membership.directory,
            backend=self._backend,
            watch=self._watch,
            order=orders.of(run.plan.run_id),
            link=lambda _messages: LocalLink(lambda: [self.workers.get(name) for name in self.stage.workers]),
        )
        self.service = service
        service.start(self.now_s)
        transport.start()

    def start_idle_aggregator(self) -> None:
        """Start an aggregator that has no run: it publishes the roster, and hears requests and presences."""

        def sink(event: TransportEvent) -> None:
            if self.service is None and isinstance(event, Message) and not self._is_request(event):
                presences.take(event, self.now_s)

        membership, transport, _ = self._serve(sink)
        presences = PresenceInbox(membership, self._watch)
        publisher = Publisher(membership.identity, membership.group, transport, membership.directory / LEDGER_FILE)
        publisher.roster(membership.roster_bytes, membership.roster)
        self._notices.keep_up(None)
        presences.subscribe(transport)
        transport.start()

    def _serve(self, sink: Sink) -> tuple[AggregatorMembership, LoopbackTransport, OwnerOrders]:
        """Return what an aggregator with or without a run needs, and make what answers the owner."""
        membership = AggregatorMembership(self.stage.aggregator_dir)
        transport, orders = self._connect("aggregator", sink), OwnerOrders(membership.directory)
        self._control = RunControl(membership, orders, lambda: self.service, watch=self._watch)
        self.standing = self._control.standing
        self._requests = OwnerRequests(membership, transport, orders, self._control)
        self._notices = NoticeBoard(membership, transport, orders)
        self._requests.subscribe()
        return membership, transport, orders

    def _is_request(self, event: TransportEvent) -> bool:
        """Hand a message to the owner's requests; return whether it was one. A refused one is logged, as the daemon does."""
        if not isinstance(event, Message):
            return False
        try:
            return self._requests.take(event.topic, event.payload, self.now_s)
        except ShoalError as error:
            Refusals(LOG).tell(event.topic, error, self.now_s)
            return True

    def ask(self, action: RequestAction, run: int = 0, **parts: Any) -> Question:
        """Let the owner send a request, and deliver what follows from it; return the question with its answer, if one came.

        ``parts`` are further arguments of `Question`.
        """
        question = Question(self.stage.fleet, action, run=run, **parts)
        client = f"owner-{question.sealed.transfer_id.hex()}"
        transport = LoopbackTransport(self.broker, client, lambda event: question.on_event(event, self.now_s))
        transport.start()
        question.send(transport)
        self.broker.pump()
        self.broker.disconnect(client, graceful=True)
        return question

    def _connect(self, name: str, on_event: Sink, will: Will | None = None) -> LoopbackTransport:
        """Return the transport of a new life of a program; events for an earlier life, which may be on the way, are dropped."""

        def sink(event: TransportEvent) -> None:
            if self._lives.get(name) is transport:
                on_event(event)

        self._lives[name] = transport = LoopbackTransport(self.broker, self.client_id(name), sink, will)
        return transport

    def _cut(self, name: str) -> None:
        client = self.client_id(name)
        self._lives.pop(name, None)
        if client in self.broker.connected():
            self.broker.disconnect(client)

    def _living(self) -> list[Any]:
        """Return the runtimes, the aggregator's service and the workers that run."""
        runtimes = [device.runtime for device in self.devices.values()]
        return [*runtimes, *filter(None, [self.service]), *self.workers.values()]

    def _samples(self, name: str, manifest: TaskManifest) -> Dataset:
        batch = self._data[name]
        if batch.x.shape[1:] != manifest.input.shape:
            raise DataError(f"samples of shape {batch.x.shape[1:]} for a task that takes {manifest.input.shape}")
        return batch

    def close(self) -> None:
        """Stop all devices and the aggregator cleanly and release files; the directories remain."""
        for one in self._living():
            one.close()
        self.devices, self.workers, self.service = {}, {}, None
        self._lives.clear()


def draw_origins(manifest: TaskManifest, count: int, seed: int) -> NDArray[np.float32]:
    """Return ``count`` starting models without their private parameters, shape (count, d), float32, without torch.

    Every tensor is drawn as torch initialises a linear or convolutional layer, uniformly within 1/sqrt(fan-in); a vector
    (a bias) has the bound of the tensor before it. `make_origins` in shoal/owner/task_compiler/origin.py uses the model's
    own initialisers instead.
    """
    rng = np.random.default_rng([seed, count])
    origins = np.empty((count, manifest.federated_length), np.float32)
    for origin in origins:
        at, bound = 0, 1.0
        for parameter in manifest.parameters:
            if parameter.segment == PRIVATE:
                break  # they come last
            if len(parameter.shape) > 1:
                bound = 1.0 / math.sqrt(math.prod(parameter.shape[1:]))
            origin[at : at + parameter.length] = rng.uniform(-bound, bound, parameter.length)
            at += parameter.length
    return origins
