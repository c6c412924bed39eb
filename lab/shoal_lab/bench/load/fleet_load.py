"""The fleet of `shoal bench load`: many devices on the real programs, mosquitto and `shoal-aggregator serve`.

A few processes drive the devices' runtimes, with one MQTT connection for each device (`shoal_lab.bench.load.driver`). A cheap
gradient replaces training; announcements, models, masks, seals, signatures, state files, acknowledgements and reminders are
real. `shoal_lab.bench.load.measurement` runs it and counts.

The devices' directories are in memory (/dev/shm if it is large enough), because each device of a real fleet has a disk of
its own. Those of the aggregator and of the broker are in the directory for temporary files, on a real disk.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from aggregator.storage.store import DATABASE, rounds_closed, stored_vector_bytes
from crypto.seal.identity import Identity
from edge_client import membership as enrolment
from shoal import limits
from shoal.errors import ConfigError, UsageError
from shoal.membership.directory import KEY_FILE
from shoal.owner.runs.plan import origins_needed
from shoal.owner.task_compiler.builtin import build
from shoal.owner.task_compiler.compile import compile_task
from shoal.protocol.recipe import DEFAULTS, LocalTraining, Recipe, as_settings
from shoal.simulation.process_fleet import PROGRAMS, Program, Stage, StageError, cpu_seconds, memory_mb
from shoal.task.bundle import TaskBundle
from shoal.transport.local_broker import BrokerProcess, queue_limits, start_broker
from shoal.util.server_process import raise_open_files
from shoal_lab.experiments.common.experiment import one_of
from shoal_lab.loopback.fleet import draw_origins

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
UNLIKE_A_FLEET: Final[Mapping[str, Any]] = {"min_contributors": 1, "quorum": 1.0, "deadline_s": 3600.0}
"""Options that are not a fleet's defaults. Every cluster moves in every round, however few devices it has, and a round with a
lost upload ends only when the upload arrives."""
CHURN_DEADLINE_S: Final = 10.0
"""Time that every round waits for devices that are gone."""
SPARE_FILES: Final = 64
"""Open files of a broker or a driver besides one, or FILES_PER_DEVICE, for each device."""
FILES_PER_DEVICE: Final = 5
"""Socket, eventfd and paho's own pair, and one state file for a moment."""
COPIES_PER_DEVICE: Final = 6
"""Files of a model's size in a device's directory: run package, two pending slots, model, and room for one being replaced."""
SHARED_MEMORY: Final = Path("/dev/shm")  # noqa: S108 - a place for a private directory of random name
LOOPBACK: Final = "lo"
"""Network interface of the sums between coordinator and workers."""


class LoadFleet(Stage):
    """A fleet with one run, and the processes that serve it; a context manager that ends them all.

    Args:
        devices: size of the fleet.
        model: name in MODELS.
        open_files: soft and hard limit on the aggregator's open files.
        spread_s, churn: see `shoal_lab.bench.load.driver.Driver`.
        page_port: port of the fleet page on this machine; 0 for none.
        shards: workers of the aggregator; 1 is an aggregator without workers.
        core_each: bind each process of the aggregator to one core, in turn: the coordinator to the first, the workers to the
            next. On one core an aggregator has no intake threads.
        algorithm, rounds: of the run.
        with_keeper: the run names a keeper, a process of its own.
    """

    def __init__(
        self,
        *,
        devices: int,
        model: str = "logistic",
        open_files: int = 1024,
        spread_s: float = 0.0,
        churn: float = 0.0,
        page_port: int = 0,
        shards: int = 1,
        core_each: bool = False,
        algorithm: str = "fedavg",
        rounds: int = 5,
        with_keeper: bool = False,
    ) -> None:
        one_of("model", model, MODELS)
        _check_open_files(devices)
        self._open_files, self._spread_s = open_files, spread_s
        self.churn, self.core_each = churn, core_each
        self._page = ["--http", f"127.0.0.1:{page_port}"] if page_port else []
        self._reports: dict[str, Path] = {}
        self.size, self.rounds, self.algorithm, self.shards = devices, rounds, algorithm, shards
        self.names = [f"dev-{place:05}" for place in range(devices)]
        bundle, unlike = _compiled(model), _with_churn(devices, churn) if churn else UNLIKE_A_FLEET
        if with_keeper:
            unlike = {**unlike, "min_contributors": limits.LEAST_CELL}
        options = Recipe(
            algorithm, as_settings(SETTINGS.get(algorithm, {})), rounds=rounds, local=LOCAL, seed=0, **unlike
        )
        self.model_bytes = 4 * bundle.length
        with contextlib.ExitStack() as stack:
            root = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-load-")))
            state_bytes = COPIES_PER_DEVICE * (self.model_bytes * origins_needed(options) + (64 << 10))
            place = _memory_directory(devices * state_bytes)
            self.states = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="shoal-load-devices-", dir=place))
            )
            self.broker: BrokerProcess = stack.enter_context(
                start_broker("mosquitto", root / "broker", queue=queue_limits(devices, self.model_bytes))
            )
            super().__init__(root, self.broker.url, (), FLEET, shards, keeper="keeper" if with_keeper else "")
            self.fleet.add_devices(enrolment.init(self.device_dir(name), name).read_bytes() for name in self.names[1:])
            # One device joins in the usual way; the drivers derive the others' memberships from it (`driver.member_like`).
            self.add_device(self.names[0])
            self.identities = [Identity.load(self.device_dir(name) / KEY_FILE) for name in self.names]
            self.plan = self.add_run(bundle, draw_origins(bundle.manifest, origins_needed(options), 0), options)
            self.run_dir = self.aggregator_dir / f"run-{self.plan.run:06d}"
            # Only now: after Ctrl-C in a constructor `__exit__` is not called.
            self._stack = stack.pop_all()

    def device_dir(self, name: str) -> Path:
        """Return a device's directory."""
        return self.states / name

    def start_aggregator(self, *arguments: str) -> Program:
        """Start `shoal-aggregator serve` with the limit on open files, and its workers unless they run."""
        sums = ["--interface", LOOPBACK] if self.workers else []
        program = super().start_aggregator(*self._page, *sums, *arguments)
        if self.keeper and self.keeper not in self.programs:
            self.start_keeper()
        resource.prlimit(program.pid, resource.RLIMIT_NOFILE, (self._open_files, self._open_files))
        for name in set(self.workers) - self.programs.keys():
            self._start(name, "aggregator", ["shard", "serve", str(self.worker_dir(name)), *sums])
        if self.core_each:
            cores = sorted(os.sched_getaffinity(0))
            for number, name in enumerate(("aggregator", *self.workers)):
                os.sched_setaffinity(self.programs[name].pid, {cores[number % len(cores)]})
        return program

    def start_drivers(self) -> None:
        """Start the processes that drive the devices."""
        for number, first in enumerate(range(0, self.size, DEVICES_PER_DRIVER)):
            spec = {
                "devices": str(self.states),
                "joined": self.names[0],
                "names": self.names[first : first + DEVICES_PER_DRIVER],
                "first": first,
                "spread_s": self._spread_s,
                "churn": self.churn,
            }
            self.start_driver(f"driver-{number}", "shoal_lab.bench.load.driver", spec)

    def start_driver(self, name: str, module: str, spec: dict[str, Any]) -> None:
        """Start a process whose ``module`` takes a JSON file with ``spec`` and its report's place."""
        report, file = self.root / f"report-{name}.json", self.root / f"{name}.json"
        file.write_text(json.dumps({**spec, "report": str(report)}))
        self._start(name, module, [str(file)])
        self._reports[name] = report

    def _software(self, name: str, package: str) -> tuple[str, Path | None, dict[str, str]]:
        if package in PROGRAMS:
            return super()._software(name, package)
        return f"from {package} import main; main()", None, {}

    def signal_drivers(self, number: int) -> None:
        """Send a signal to all drivers; at SIGUSR1 devices leave and return."""
        for name in self._reports:
            self.programs[name].process.send_signal(number)

    def sample(self, at_s: float) -> dict[str, Any]:
        """Return the present state of the processes: CPU in seconds since each started, memory in MB of 2^20 bytes.

        ``main_cpu_s`` is the CPU of the aggregator's main thread, which runs its loop; it is part of ``aggregator_cpu_s``.
        ``shard_cpu_s`` has one entry for each worker; ``coordinator_vector_bytes`` are the updates and means that the
        aggregator's own process stores, ``database_bytes`` its database with SQLite's side files.

        Raises:
            StageError: a process has ended by itself.
        """
        self.check()
        aggregator, workers = self.programs["aggregator"], [self.programs[name].pid for name in self.workers]
        try:
            rss_mb, rss_mb_max = memory_mb(aggregator.pid)
            files = sum(1 for _ in Path(f"/proc/{aggregator.pid}/fd").iterdir())
            cpu_s, main_s = cpu_seconds(aggregator.pid), cpu_seconds(aggregator.pid, aggregator.pid)
        except OSError as error:
            raise StageError(f"the aggregator has ended:\n{aggregator.tail()}") from error
        return {
            "at_s": at_s,
            "closed": rounds_closed(self.run_dir),
            "aggregator_cpu_s": cpu_s,
            "broker_cpu_s": cpu_seconds(self.broker.pid) if self.broker.pid else 0.0,
            "rss_mb": rss_mb,
            "rss_mb_max": rss_mb_max,
            "open_files": files,
            "main_cpu_s": main_s,
            "drivers_cpu_s": sum(self.programs[name].cpu_s() for name in self._reports),
            "shard_rss_mb_max": max((memory_mb(pid)[1] for pid in workers), default=0.0),
            "shard_cpu_s": list(map(cpu_seconds, workers)),
            "coordinator_vector_bytes": _size(self.run_dir.glob("vectors/*.f32")) + stored_vector_bytes(self.run_dir),
            "database_bytes": _size(self.run_dir.glob(f"{DATABASE}*")),
            "keeper_cpu_s": cpu_seconds(self.programs[self.keeper].pid) if self.keeper else 0.0,
            "keeper_rss_mb_max": memory_mb(self.programs[self.keeper].pid)[1] if self.keeper else 0.0,
        }

    def reports(self) -> list[dict[str, Any]]:
        """End the drivers and return their counts.

        Raises:
            StageError: one left no report.
        """
        self.signal_drivers(signal.SIGTERM)
        found = []
        for name, report in self._reports.items():
            program = self.programs[name]
            with contextlib.suppress(subprocess.TimeoutExpired):  # one that replays opens all answers of the run
                program.process.wait(STALLED_S)
            self.stop(name)
            if not report.exists():
                raise StageError(f"{name} left no report:\n{program.tail()}")
            found.append(json.loads(report.read_text()))
        self._reports.clear()
        return found

    def close(self) -> None:
        """End all processes and remove the directories."""
        super().close()
        self._stack.close()


def _size(files: Iterable[Path]) -> int:
    """Return the bytes of files, which may disappear meanwhile."""
    found = 0
    for path in files:
        with contextlib.suppress(FileNotFoundError):
            found += path.stat().st_size
    return found


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
def _compiled(model: str) -> TaskBundle:
    """Return the compiled task of a model. Compiling takes seconds, so the fleets of a process share it."""
    made = build(model, **MODELS[model])
    return compile_task(made.model, made.loss, made.example, name=model, kind=made.kind, hyper=LOCAL)


def _with_churn(devices: int, churn: float) -> dict[str, Any]:
    """Return the options that are not a fleet's defaults where devices leave: those that stay in a round are enough for it.

    Devices that left come back after the next round. A quorum that needs them would wait for them without end.
    """
    gone = round(churn * devices)
    online = max(1, devices - gone)
    quorum = min(DEFAULTS.quorum, max(1, online - gone) / online)
    return {"deadline_s": CHURN_DEADLINE_S, "quorum": quorum}


def _memory_directory(needed_bytes: int) -> Path | None:
    """Return the directory in memory if it has room for the devices' state, else None."""
    try:
        free_bytes = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:
        return None
    return SHARED_MEMORY if free_bytes > needed_bytes and os.access(SHARED_MEMORY, os.W_OK) else None
