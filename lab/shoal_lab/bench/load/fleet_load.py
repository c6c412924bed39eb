"""The fleet of `shoal bench load`: many devices on the real programs, mosquitto and `shoal-aggregator serve`.

A few processes drive the devices' runtimes, with one MQTT connection for each device (`shoal_lab.bench.load.driver`). A cheap
gradient replaces training; announcements, models, masks, seals, signatures, state files, acknowledgements and reminders are
real. `shoal_lab.bench.load.measurement` runs it and counts.

The devices' directories are in memory (/dev/shm if it is large enough), because each device of a real fleet has a disk of
its own. Those of the aggregator and of the broker are in the directory for temporary files, on a real disk.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Self

from aggregator import membership as aggregators
from aggregator.shards import membership as shard_members
from aggregator.storage.run_status import rounds_closed, stored_vector_bytes
from crypto.seal.identity import Identity
from edge_client import membership as enrolment
from shoal import limits
from shoal.errors import ConfigError, UsageError
from shoal.membership.directory import KEY_FILE
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.runs.plan import RunOptions, make_plan, origins_needed, write_run
from shoal.owner.task_compiler.builtin import build
from shoal.owner.task_compiler.compile import compile_task
from shoal.protocol.documents import RunPlan
from shoal.simulation.loopback_fleet import draw_origins
from shoal.simulation.process_fleet import ONE_THREAD, Program, StageError, cpu_seconds
from shoal.task.bundle import TaskBundle
from shoal.task.manifest import LocalTraining
from shoal.transport.local_broker import BrokerProcess, queue_limits, start_broker
from shoal.util.open_files import raise_open_files
from shoal_lab.bench.load.driver import DriverReport, DriverSpec

Model = Literal["logistic", "mlp"]

FLEET: Final = "load"
MODELS: Final[dict[str, dict[str, int]]] = {
    "logistic": {"inputs": 784, "classes": 10},
    "mlp": {"inputs": 784, "hidden": 200, "classes": 10},
}
SETTINGS: Final[dict[str, dict[str, str]]] = {"ifca": {"k": "4", "restarts": "1"}}
"""Settings of the algorithms that need any."""
LOCAL: Final = LocalTraining(epochs=0, steps=1, batch_size=0, lr=0.5)
"""Local training of a device: one step on all samples."""
DEVICES_PER_DRIVER: Final = 250
STALLED_S: Final = 300.0
"""The bench gives up if no round has closed and no upload has been stored for this long."""
STOP_S: Final = 20.0
UNLIKE_A_FLEET: Final[Mapping[str, Any]] = {"min_contributors": 1, "quorum": 1.0, "deadline_s": 3600.0}
"""Options that are not a fleet's defaults. Every cluster moves in every round, however few devices it has, and a round with a
lost upload ends only when the upload arrives."""
WITH_CHURN: Final[Mapping[str, Any]] = {"deadline_s": 10.0}
"""The one option that is not a fleet's default where devices leave: every round waits that long for those that are gone."""
SPARE_FILES: Final = 64
"""Open files of a broker or a driver besides one, or FILES_PER_DEVICE, for each device."""
FILES_PER_DEVICE: Final = 5
"""Socket, eventfd and paho's own pair, and one state file for a moment."""
COPIES_PER_DEVICE: Final = 6
"""Files of a model's size in a device's directory: run package, two pending slots, model, and room for one being replaced."""
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a place for a private directory of random name
LOOPBACK: Final = "lo"
"""Network interface of the sums between coordinator and workers."""
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)


@dataclass(slots=True, kw_only=True)
class Sample:
    """State of the processes at one moment; CPU in seconds since each started, memory in MB of 2^20 bytes.

    ``main_cpu_s`` is the CPU of the aggregator's main thread, which runs its loop; it is part of ``aggregator_cpu_s``.
    ``shard_cpu_s`` has one entry for each worker.
    """

    at_s: float
    closed: int
    aggregator_cpu_s: float
    broker_cpu_s: float
    rss_mb: float
    rss_mb_max: float
    open_files: int
    main_cpu_s: float = 0.0
    drivers_cpu_s: float = 0.0
    shard_rss_mb_max: float = 0.0
    shard_cpu_s: tuple[float, ...] = ()
    coordinator_vector_bytes: int = 0


class LoadFleet:
    """A fleet of n devices with one run, and the processes that serve it; a context manager that ends them all.

    Args:
        devices: size of the fleet.
        model: name in MODELS.
        algorithm: of the run.
        rounds: training rounds of the run.
        open_files: soft and hard limit on the aggregator's open files.
        spread_s, churn: see `DriverSpec`.
        page_port: port of the fleet page on this machine; 0 for none.
        shards: workers of the aggregator; 1 is an aggregator without workers.
        core_each: bind each process of the aggregator to one core, in turn: the coordinator to the first, the workers to the
            next. On one core an aggregator has no intake threads.
    """

    def __init__(
        self,
        *,
        devices: int,
        model: Model = "logistic",
        algorithm: str = "fedavg",
        rounds: int = 5,
        open_files: int = 1024,
        spread_s: float = 0.0,
        churn: float = 0.0,
        page_port: int = 0,
        shards: int = 1,
        core_each: bool = False,
    ) -> None:
        if model not in MODELS:
            raise UsageError(f"no model {model!r}", hint=f"use {' or '.join(MODELS)}")
        self.devices, self.rounds, self.algorithm = devices, rounds, algorithm
        self._open_files = open_files
        self._spread_s = spread_s
        self.churn = churn
        self.shards = shards
        self.core_each = core_each
        self.worker_names = [f"worker-{number}" for number in range(shards)] if shards > 1 else []
        self.workers: list[Program] = []
        self._page = ["--http", f"127.0.0.1:{page_port}"] if page_port else []
        self._stack = contextlib.ExitStack()
        self._programs: list[Program] = []
        self._drivers: list[tuple[Program, Path]] = []
        self.names = [f"dev-{place:05}" for place in range(devices)]
        _check_open_files(devices)
        try:
            self._set_up(model)
        except BaseException:
            # Also after Ctrl-C: `__exit__` is not called for an object whose constructor has failed.
            self._stack.close()
            raise

    def _set_up(self, model: Model) -> None:
        self.root = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-load-")))
        self.bundle = _compiled(model)
        options = RunOptions(
            self.algorithm,
            SETTINGS.get(self.algorithm, {}),
            rounds=self.rounds,
            local=LOCAL,
            seed=0,
            **(WITH_CHURN if self.churn else UNLIKE_A_FLEET),
        )
        self.model_bytes = 4 * self.bundle.length
        state_bytes = self.devices * COPIES_PER_DEVICE * (self.model_bytes * origins_needed(options) + (64 << 10))
        place = _memory_directory(state_bytes)
        self._states = Path(
            self._stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-load-devices-", dir=place))
        )
        queue = queue_limits(self.devices, self.model_bytes)
        self.broker: BrokerProcess = self._stack.enter_context(
            start_broker("mosquitto", self.root / "broker", queue=queue)
        )
        self.aggregator_dir = self.root / "aggregator"
        self.fleet, self.identities = self._enrol()
        self.plan: RunPlan = make_plan(self.fleet, self.bundle, options)
        origins = draw_origins(self.bundle.manifest, origins_needed(options), 0)
        self.package = write_run(self.fleet, self.plan, self.bundle, origins)
        shutil.copy2(self.package, self.aggregator_dir / aggregators.RUNS_DIRECTORY / self.package.name)
        self.run_dir = self.aggregator_dir / f"run-{self.plan.run:06d}"

    def _enrol(self) -> tuple[FleetDirectory, list[Identity]]:
        """Make the owner's directory, the aggregator's and the devices', with one roster for all of them."""
        fleet = FleetDirectory.create(self.root / "owner", FLEET, self.broker.url)
        card = aggregators.init(self.aggregator_dir).read_bytes()
        fleet.add_aggregator(card)
        cards = [enrolment.init(self._states / name, name).read_bytes() for name in self.names]
        identities = [Identity.load(self._states / name / KEY_FILE) for name in self.names]
        fleet.add_devices(cards)
        # The grant is made again, since it contains the roster, which lists all devices only now.
        grant = fleet.add_aggregator(card)
        for name in self.worker_names:
            directory = self.root / name
            own = fleet.add_worker(shard_members.init(directory, name).read_bytes())
            shard_members.join(directory, own.read_bytes(), fleet.fingerprint)
        aggregators.join(self.aggregator_dir, grant.read_bytes(), fleet.fingerprint)
        # One device joins in the usual way; the drivers derive the others' memberships from it (`driver.member_like`).
        joined = fleet.add_device(cards[0])
        enrolment.join(self._states / self.names[0], joined.read_bytes(), fleet.fingerprint)
        return fleet, identities

    def start_aggregator(self) -> None:
        """Start `shoal-aggregator serve` with the limit on open files."""
        limit = self._open_files

        def limited() -> None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
            self._before_program(0)

        start = "from aggregator.cli import main; main()"
        sums = ["--interface", LOOPBACK] if self.worker_names else []
        serve = ["serve", str(self.aggregator_dir), *self._page, *sums]
        self.aggregator = self._start("aggregator", start, serve, limited)
        if not self.workers:
            self.workers = [
                self._start(
                    name,
                    start,
                    ["shard", "serve", str(self.root / name), "--interface", LOOPBACK],
                    functools.partial(self._before_program, number),
                )
                for number, name in enumerate(self.worker_names, 1)
            ]

    def _before_program(self, number: int) -> None:
        """Prepare the aggregator's ``number``-th process between fork and exec: its end with its parent's, and its core."""
        _end_with_parent()
        if self.core_each:
            cores = sorted(os.sched_getaffinity(0))
            os.sched_setaffinity(0, {cores[number % len(cores)]})

    def start_drivers(self) -> None:
        """Start the processes that drive the devices."""
        for number, first in enumerate(range(0, self.devices, DEVICES_PER_DRIVER)):
            report = self.root / f"report-{number}.json"
            names = self.names[first : first + DEVICES_PER_DRIVER]
            spec = DriverSpec(
                devices=str(self._states),
                joined=self.names[0],
                names=names,
                first=first,
                report=str(report),
                spread_s=self._spread_s,
                churn=self.churn,
            )
            file = self.root / f"driver-{number}.json"
            file.write_text(json.dumps(dataclasses.asdict(spec)))
            start = "from shoal_lab.bench.load.driver import main; main()"
            self._drivers.append((self._start(f"driver-{number}", start, [str(file)]), report))

    def let_devices_leave(self) -> None:
        """Let the share ``churn`` of the devices leave, and those that left the last time return."""
        for program, _ in self._drivers:
            program.process.send_signal(signal.SIGUSR1)

    def start_driver(self, name: str, code: str, spec: dict[str, Any]) -> None:
        """Start one more driver process from Python ``code`` that takes a JSON file with ``spec`` and its report's place."""
        report, file = self.root / f"report-{name}.json", self.root / f"{name}.json"
        file.write_text(json.dumps({**spec, "report": str(report)}))
        self._drivers.append((self._start(name, code, [str(file)]), report))

    def _start(self, name: str, code: str, arguments: list[str], before: Any = None) -> Program:
        logs = self.root / "logs"
        logs.mkdir(exist_ok=True)
        handle = (logs / f"{name}.log").open("ab")
        process = subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=subprocess.STDOUT,
            env={**os.environ, **ONE_THREAD, "NO_COLOR": "1"},
            preexec_fn=before or _end_with_parent,  # noqa: PLW1509 - two system calls, no Python lock is taken
        )
        program = Program(name, process, logs / f"{name}.log", handle)
        self._programs.append(program)
        return program

    @property
    def joined_dir(self) -> Path:
        """Directory of the device whose membership all others share."""
        return self._states / self.names[0]

    def kill_aggregator(self) -> None:
        """End the aggregator with SIGKILL."""
        self.aggregator.stop(signal.SIGKILL)
        self._programs.remove(self.aggregator)

    def sample(self, at_s: float) -> Sample:
        """Return the present state of the aggregator and the broker.

        Raises:
            StageError: a process has ended by itself.
        """
        self.check()
        pid = self.aggregator.pid
        try:
            rss_mb, rss_mb_max = _memory_mb(pid)
            files = sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())
            cpu_s, main_s = cpu_seconds(pid), cpu_seconds(pid, pid)
        except OSError as error:
            raise StageError(f"the aggregator has ended:\n{self.aggregator.tail()}") from error
        broker_s = cpu_seconds(self.broker.pid) if self.broker.pid else 0.0
        return Sample(
            at_s=at_s,
            closed=rounds_closed(self.run_dir),
            aggregator_cpu_s=cpu_s,
            broker_cpu_s=broker_s,
            rss_mb=rss_mb,
            rss_mb_max=rss_mb_max,
            open_files=files,
            main_cpu_s=main_s,
            drivers_cpu_s=sum(cpu_seconds(program.pid) for program, _ in self._drivers),
            shard_rss_mb_max=max((_memory_mb(program.pid)[1] for program in self.workers), default=0.0),
            shard_cpu_s=tuple(cpu_seconds(program.pid) for program in self.workers),
            coordinator_vector_bytes=self._vector_bytes(),
        )

    def _vector_bytes(self) -> int:
        """Return the bytes of updates and means that the aggregator's own process stores now."""
        means = sum(path.stat().st_size for path in self.run_dir.glob("vectors/*.f32") if path.exists())
        return means + stored_vector_bytes(self.run_dir)

    def check(self) -> None:
        """Raise StageError if a process has ended by itself."""
        for program in self._programs:
            code = program.process.poll()
            if code is not None:
                raise StageError(f"{program.name} ended with status {code}:\n{program.tail()}")

    def reports(self) -> list[DriverReport]:
        """End the drivers and return their counts."""
        for program, _ in self._drivers:
            program.process.send_signal(signal.SIGTERM)
        found = []
        for program, report in self._drivers:
            try:
                program.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                program.process.kill()
            if not report.exists():
                raise StageError(f"{program.name} left no report:\n{program.tail()}")
            found.append(DriverReport(**json.loads(report.read_text())))
            self._programs.remove(program)
            program.stop()
        self._drivers.clear()
        return found

    def close(self) -> None:
        """End all processes and remove the directories."""
        # All are signalled before the first is waited for, so that they end at the same time.
        for program in self._programs:
            if program.process.poll() is None:
                program.process.send_signal(signal.SIGTERM)
        for program in self._programs:
            program.stop()
        self._programs.clear()
        self._stack.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _memory_mb(pid: int) -> tuple[float, float]:
    """Return a process's resident memory now and at its peak (VmRSS, VmHWM), in MB of 2^20 bytes."""
    found = {}
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        name, _, value = line.partition(":")
        if name in ("VmRSS", "VmHWM"):
            found[name] = int(value.split()[0]) / 1024
    return found.get("VmRSS", 0.0), found.get("VmHWM", 0.0)


def _check_open_files(devices: int) -> None:
    """Raise this process's limit on open files, which the broker and the drivers inherit.

    Raises:
        ConfigError: the hard limit is too low, or the roster too long.
    """
    if devices > limits.MAX_DEVICES:
        raise UsageError(f"{devices} devices are more than a roster takes: {limits.MAX_DEVICES}")
    hard = raise_open_files()
    needed = SPARE_FILES + max(devices, FILES_PER_DEVICE * min(devices, DEVICES_PER_DRIVER))
    if hard < needed:
        raise ConfigError(
            f"{devices} devices need {needed} open files, and the hard limit here is {hard}",
            hint="raise it for this shell (ulimit -Hn), or use fewer devices",
        )


@functools.cache
def _compiled(model: Model) -> TaskBundle:
    """Return the compiled task of a model. Compiling takes seconds, so the fleets of a process share it."""
    made = build(model, **MODELS[model])
    return compile_task(made.model, made.loss, made.example, name=model, kind=made.kind, hyper=LOCAL)


def _memory_directory(needed_bytes: int) -> Path | None:
    """Return the directory in memory if it has room for the devices' state, else None."""
    try:
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return None
    return SHARED_MEMORY if free_bytes > needed_bytes and os.access(SHARED_MEMORY, os.W_OK) else None


def _end_with_parent() -> None:
    """Ask the kernel for SIGTERM when the parent dies; runs between fork and exec."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
