"""Process that runs many device runtimes for `shoal bench load`, each on its own MQTT connection.

The runtimes, transports, keys and messages are those of real devices. Three things differ. The gradient is replaced by one
that costs next to nothing (`Pull`). Everything that the devices of a fleet share (grant, roster) is loaded once, since
2,000 copies of a roster of 2,000 would only measure this process. One thread steps all runtimes of a process; each transport
has its own network thread, as on a device.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import heapq
import itertools
import json
import os
import queue
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, NoReturn

import numpy as np

from crypto.seal.identity import Identity
from edge_client.config import EdgeConfig
from edge_client.learning.data import Dataset
from edge_client.learning.model import Score
from edge_client.learning.worker import run_job
from edge_client.membership import DeviceMembership
from edge_client.protocol.presence import presence
from edge_client.runtime import DeviceRuntime
from shoal.errors import UntrustedError
from shoal.membership.directory import KEY_FILE, load_receiving
from shoal.protocol.chunking import Chunk, ChunkKind, parse
from shoal.protocol.messages import Action, Control
from shoal.transport.base import Connected, Qos, TakenOver, TransportEvent
from shoal.transport.mqtt import MqttTransport
from shoal.util.console import setup_logging
from shoal.util.files import write_atomic
from shoal.util.process import settle
from shoal.util.server_process import raise_open_files

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_client.learning.worker import Cancel
    from shoal.protocol.channels import Channel
    from shoal.protocol.reassembly import Transfer
    from shoal.task.bundle import TaskBundle
    from shoal.task.manifest import TaskManifest
    from shoal.types import Float32Vector

GROUPS: Final = 4
"""Hidden groups of devices; each group has its own target model."""
SAMPLES: Final = 5
"""Samples of a device: the fewest that split into three shares."""
TARGET_NORM: Final = 2.0
SPREAD: Final = 0.1
"""Relative difference between the targets of the first and the last device of a group."""
THREAD_STACK_BYTES: Final = 256 * 1024
"""Stack of a network thread; the default of 8 MB is address space that 2,000 threads would exhaust."""
CONNECTING_MOST: Final = 16
"""Connections of one process that may wait for the broker's answer at a time. A broker that has to answer all of a fleet at
once takes longer than the transport's handshake timeout, after which it would fall back to MQTT 3.1.1."""
POLL_S: Final = 0.25
TICK_S: Final = 0.5
"""Interval between two ticks of every runtime, as in `edge_client.daemon`."""
SWITCH_INTERVAL_S: Final = 0.0005
"""Longest time that a network thread waits for the interpreter while the stepping thread computes; Python's own is 5 ms."""


class Pull:
    """Loss and gradient of half the squared distance to a target: `edge_client.learning.model.Backend` without a graph."""

    def __init__(self, target: Float32Vector, scale: float) -> None:
        self._target = target
        self._scale = np.float32(scale)

    def score(self, theta: Float32Vector, x: NDArray[Any], y: NDArray[Any]) -> Score:
        """Return half the squared distance of ``theta`` (d,) float32 as the loss; more labels are right when it is small."""
        loss, _ = self.grad(theta, x, y)
        return Score(loss, round(y.size / (1.0 + loss)), y.size)

    def grad(self, theta: Float32Vector, x: NDArray[Any], y: NDArray[Any]) -> tuple[float, Float32Vector]:  # noqa: ARG002
        """Return the loss and its gradient (d,) float32."""
        away = theta - self._scale * self._target
        return 0.5 * float(np.dot(away, away)), away

    def predict(self, theta: Float32Vector, x: NDArray[Any]) -> NDArray[np.float32]:  # noqa: ARG002
        """Return zeros, shape (n, 1): nothing in the bench predicts."""
        return np.zeros((len(x), 1), np.float32)


def target_of(group: int, length: int) -> Float32Vector:
    """Return the target of a hidden group, shape (length,), float32, the same in every process."""
    drawn = np.random.default_rng([group, length]).standard_normal(length).astype(np.float32)
    drawn *= np.float32(TARGET_NORM / np.linalg.norm(drawn))
    return drawn


def scale_of(place: int) -> float:
    """Return the factor on its group's target that makes the device at ``place`` in the fleet differ from the others."""
    # Multiples of the golden ratio spread evenly over [0, 1) for any number of devices.
    return 1.0 + SPREAD * (place * 0.618034 % 1.0)


def batch_of(manifest: TaskManifest) -> Dataset:
    """Return samples of the task's shapes; `Pull` ignores their values."""
    x = np.zeros((SAMPLES, *manifest.input.shape), manifest.input.dtype)
    return Dataset(x, np.zeros((SAMPLES, *manifest.label.shape), manifest.label.dtype))


class LoadTransport(MqttTransport):
    """The devices' transport; counts the reminders that it is given to send."""

    reminders = 0

    def publish(self, topic: str, payload: bytes | Chunk, *, retain: bool = False, qos: Qos = 1) -> None:
        """Queue a message for the broker."""
        self.reminders += parse(bytes(payload))[0].kind is ChunkKind.REMINDER
        super().publish(topic, payload, retain=retain, qos=qos)


class LoadRuntime(DeviceRuntime):
    """The devices' runtime; counts the questions for missing chunks that it receives."""

    nacks = 0

    def _content(self, channel: Channel, label: str, transfer: Transfer) -> Any:
        content = super()._content(channel, label, transfer)
        self.nacks += isinstance(content, Control) and content.action == Action.NACK
        return content


class Trainings:
    """Jobs of all devices of a process, each run when it is due; the delay simulates the duration of a training.

    Args:
        delay_s: draws a job's delay.
    """

    def __init__(self, delay_s: Callable[[], float]) -> None:
        self._delay_s = delay_s
        self._due: list[tuple[float, int, LoadWorker]] = []
        self._numbers = itertools.count()
        self.carried_out = 0

    def add(self, worker: LoadWorker) -> int:
        """Queue a worker's job; return its number."""
        number = next(self._numbers)
        heapq.heappush(self._due, (time.monotonic() + self._delay_s(), number, worker))
        return number

    def wait_s(self) -> float:
        """Return the seconds until the next job is due, POLL_S at most."""
        return max(0.0, min(POLL_S, self._due[0][0] - time.monotonic())) if self._due else POLL_S

    def run_due(self) -> bool:
        """Run one job that is due; return whether there was one."""
        if not self._due or self._due[0][0] > time.monotonic():
            return False
        _, number, worker = heapq.heappop(self._due)
        if worker.waiting is not None and worker.waiting[0] == number:
            self.carried_out += 1
            run_job(worker.waiting[1], lambda: False, worker.waiting[2])
        return True


class LoadWorker:
    """One device's `edge_client.learning.worker.Worker`: its job waits until the process's `Trainings` runs it."""

    def __init__(self, trainings: Trainings) -> None:
        self._trainings = trainings
        self.waiting: tuple[int, Callable[[Cancel], Any], Callable[[Any], None]] | None = None

    def submit(self, job: Callable[[Cancel], Any], done: Callable[[Any], None]) -> None:
        """Queue ``job`` in the place of the one before it."""
        self.waiting = (self._trainings.add(self), job, done)

    def cancel(self) -> None:
        """Cancel the queued job."""
        self.waiting = None

    close = cancel


def member_like(joined: DeviceMembership, directory: Path) -> DeviceMembership:
    """Return the membership of the device whose keys are in ``directory``.

    Grant and roster are those of ``joined``: without users at the broker, a fleet's grants hold the same for every device.
    """
    member = copy.copy(joined)
    member.directory = directory
    member.identity = Identity.load(directory / KEY_FILE)
    member.receiving = load_receiving(directory)
    member.later = list(joined.later)
    return member


class _Present(NamedTuple):
    """A device that runs: when it was started, in ns since 1970, and its parts."""

    birth: int
    transport: LoadTransport
    runtime: LoadRuntime


_Arrived = tuple[int, int, "TransportEvent"]
"""An event, with the place and the birth of its device."""


class Driver:
    """All devices of one process.

    Args:
        spec: ``devices``, the directory with one subdirectory a device; ``joined``, the name of the device whose directory holds
            the membership that all share; ``names`` of the devices that this process drives; ``first``, the place of the first of
            them in the fleet, which decides on hidden groups; ``spread_s``, the seconds over which the devices' trainings end at
            random, 0 to train at once; ``churn``, the share of the devices that leave at each SIGUSR1, while those that left at
            the one before start again from their files.
    """

    def __init__(self, spec: SimpleNamespace) -> None:
        self._spec, self._devices = spec, Path(spec.devices)
        self._inbox: queue.SimpleQueue[_Arrived | Literal["churn"] | None] = queue.SimpleQueue()
        self._trainings = Trainings(self._delay_s)
        self._random = np.random.default_rng(spec.first)
        self._leaving = np.random.default_rng([spec.first, 1])
        self._targets: dict[tuple[int, int], Float32Vector] = {}
        self._present: dict[int, _Present] = {}
        self._to_start: deque[int] = deque()
        self._connecting: set[int] = set()
        self._away: list[int] = []
        self._nacks = self._reminders = 0

    @functools.cached_property
    def _joined(self) -> DeviceMembership:
        return DeviceMembership(self._devices / self._spec.joined)

    def stop(self) -> None:
        """End `run` soon; may be called by a signal handler."""
        self._inbox.put(None)

    def churn(self) -> None:
        """Let devices leave and others return soon, see `Driver`; may be called by a signal handler."""
        self._inbox.put("churn")

    def run(self) -> None:
        """Drive the devices until `stop` is called.

        Raises:
            UntrustedError: another client uses the id of one of them.
        """
        for place in range(len(self._spec.names)):
            self._open(place)
        settle()
        ticked_s = 0.0
        while True:
            while self._to_start and len(self._connecting) < CONNECTING_MOST:
                place = self._to_start.popleft()
                self._connecting.add(place)
                self._present[place].transport.start()
            if not self._take():
                return
            now_s = time.monotonic()
            if now_s - ticked_s >= TICK_S:
                ticked_s = now_s
                for present in self._present.values():
                    present.runtime.tick(now_s)
            self._trainings.run_due()

    def _take(self) -> bool:
        """Hand over the events that have arrived, waiting for the first as long as no job is due; False to stop."""
        with contextlib.suppress(queue.Empty):
            item = self._inbox.get(timeout=self._trainings.wait_s())
            while True:
                if item is None:
                    return False
                if item == "churn":
                    self._churn()
                else:
                    self._handle(*item)
                item = self._inbox.get_nowait()
        return True

    def _handle(self, place: int, birth: int, event: TransportEvent) -> None:
        present = self._present.get(place)
        if present is None or present.birth != birth:
            return  # of a device that has left meanwhile
        if isinstance(event, TakenOver):
            raise UntrustedError(
                f"another client uses the id of {self._spec.names[place]}", hint="end the other load bench first"
            )
        if isinstance(event, Connected):
            self._connecting.discard(place)
        present.runtime.on_event(event, time.monotonic())

    def _churn(self) -> None:
        """Let a share of the devices leave, and those that left the last time return."""
        candidates = sorted(self._present.keys() - self._connecting - set(self._to_start))
        count = min(len(candidates), round(self._spec.churn * len(self._spec.names)))
        leaving = [candidates[i] for i in self._leaving.choice(len(candidates), count, replace=False)]
        for place in self._away:
            self._open(place)
        self._away = leaving
        for place in leaving:
            left = self._present.pop(place)
            left.runtime.close()
            self._nacks += left.runtime.nacks
            self._reminders += left.transport.reminders

    def _open(self, place: int) -> None:
        """Start a device from its files; it connects when its turn comes."""
        member = member_like(self._joined, self._devices / self._spec.names[place])
        birth = time.time_ns()

        def sink(event: TransportEvent) -> None:
            self._inbox.put((place, birth, event))

        transport = LoadTransport(
            member.broker,
            f"shoal-{member.fleet}-{member.name}",
            sink,
            will=presence(member, birth, online=False),
        )
        runtime = LoadRuntime(
            EdgeConfig(member.directory, data=member.directory),  # not read: `batch_of` makes the samples
            member,
            transport,
            LoadWorker(self._trainings),
            birth=birth,
            results=lambda callback: callback(),
            uniform=self._random.random,
            samples=batch_of,
            backend=lambda bundle, _threads: self._pull(self._spec.first + place, bundle),
        )
        runtime.start()
        self._present[place] = _Present(birth, transport, runtime)
        self._to_start.append(place)

    def _pull(self, place: int, bundle: TaskBundle) -> Pull:
        key = (place % GROUPS, bundle.length)
        if key not in self._targets:
            self._targets[key] = target_of(*key)
        return Pull(self._targets[key], scale_of(place))

    def _delay_s(self) -> float:
        return float(self._spec.spread_s * self._random.random())

    def report(self) -> dict[str, Any]:
        """Return the counts so far: trainings carried out, questions for missing chunks received, and reminders sent."""
        return {
            "uploads": self._trainings.carried_out,
            "nacks": self._nacks + sum(present.runtime.nacks for present in self._present.values()),
            "reminders": self._reminders + sum(present.transport.reminders for present in self._present.values()),
        }


def spec_of() -> SimpleNamespace:
    """Return the task in the JSON file that the first argument names, with the process set up for many connections."""
    setup_logging("warning")
    raise_open_files()
    return SimpleNamespace(**json.loads(Path(sys.argv[1]).read_text()))


def drive(made: Any, report: str) -> NoReturn:
    """Run a `Driver` or `Replay` until SIGTERM, write its counts to the file ``report``, and end; SIGINT is the parent's."""
    signal.signal(signal.SIGTERM, lambda *_: made.stop())
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    made.run()
    write_atomic(Path(report), json.dumps(made.report()).encode())
    # Hundreds of network threads are at work; closing each connection politely would take seconds for nothing.
    os._exit(0)


def main() -> None:
    """Drive the devices of the process's task."""
    threading.stack_size(THREAD_STACK_BYTES)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    spec = spec_of()
    driver = Driver(spec)
    signal.signal(signal.SIGUSR1, lambda *_: driver.churn())
    drive(driver, spec.report)
