"""A whole fleet of real programs on this machine, for the demo, the benchmarks and the tests.

Cards, grants and run files are copied between directories instead of machines; the programs run as they do in a fleet.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Final

from aggregator import membership as aggregator_membership
from aggregator.keeper import daemon as keeper_daemon
from aggregator.shards import membership as worker_membership
from aggregator.storage.store import read_last_record, read_records, rounds_closed
from edge_client import membership as enrolment
from edge_client.storage.state import DeviceState
from shoal.errors import ShoalError
from shoal.membership.grants import KEEPER_ROLE, WORKER_ROLE
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.vault import ROSTER_FILE
from shoal.owner.runs.plan import make_plan, with_keeper, write_run
from shoal.protocol.documents import RunPlan, Schedule
from shoal.protocol.recipe import Recipe
from shoal.simulation.closing import Closing
from shoal.util.files import write_atomic

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from shoal.task.bundle import TaskBundle

STOP_S: Final = 10.0
TICKS: Final = os.sysconf("SC_CLK_TCK")
ONE_THREAD: Final = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)


class StageError(ShoalError):
    """A program of the staged fleet ended early, or a run took too long."""


def cpu_seconds(pid: int, thread: int = 0) -> float:
    """Return the user and system CPU seconds of a process, or of one ``thread`` of it, to a clock tick."""
    place = f"/proc/{pid}/task/{thread}/stat" if thread else f"/proc/{pid}/stat"
    # The second field is the program's name in parentheses, which may itself contain spaces and parentheses.
    fields = Path(place).read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


def memory_mb(pid: int) -> tuple[float, float]:
    """Return a process's resident memory now and at its peak (VmRSS, VmHWM), in MB of 2^20 bytes; 0 if it has ended."""
    lines = (line.partition(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    found = {name: int(value.split()[0]) / 1024 for name, _, value in lines if name in ("VmRSS", "VmHWM")}
    return found.get("VmRSS", 0.0), found.get("VmHWM", 0.0)


@dataclass(slots=True)
class Program:
    """A started program and its log file."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path
    handle: IO[bytes] = field(repr=False)

    @property
    def pid(self) -> int:
        """The program's process id."""
        return self.process.pid

    def peak_rss_mb(self) -> float:
        """Return the program's peak memory (VmHWM) in MB of 2^20 bytes.

        Raises:
            StageError: the program has ended.
        """
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # once `poll` has collected the exit status
            if peak := memory_mb(self.pid)[1]:
                return peak
        raise StageError(f"{self.name} has ended", hint=f"see {self.log}")

    def cpu_s(self) -> float:
        """Return the CPU seconds of the program so far, to a clock tick.

        Raises:
            StageError: the program has ended.
        """
        try:
            return cpu_seconds(self.pid)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise StageError(f"{self.name} has ended", hint=f"see {self.log}") from error

    def tail(self, lines: int = 15) -> str:
        """Return the last ``lines`` lines of the program's log."""
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-lines:])

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Send a signal, wait, and return the exit status; a program that does not end is killed."""
        if self.process.poll() is None:
            self.process.send_signal(number)
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.handle.close()
        return self.process.wait()


PROGRAMS: Final = {
    "aggregator": "aggregator.cli",
    "keeper": "aggregator.keeper.cli",
    "edge_client": "edge_client.program",
}
"""Module with the program of each package."""


class Stage(Closing):
    """A fleet's directories and programs under one root.

    Args:
        root: an empty directory.
        broker: the broker's address.
        devices: the devices' names.
        fleet: the fleet's name.
        shards: workers of the aggregator; 1 is an aggregator without workers.
        keeper: name of a keeper, which runs are signed with; empty for none.
    """

    def __init__(
        self,
        root: Path,
        broker: str,
        devices: tuple[str, ...],
        fleet: str = "demo",
        shards: int = 1,
        keeper: str = "",
    ) -> None:
        self.root = root
        self.fleet = FleetDirectory.create(root / "owner", fleet, broker)
        self.aggregator_dir = root / "aggregator"
        self.programs: dict[str, Program] = {}
        self.devices: tuple[str, ...] = ()
        card = aggregator_membership.init(self.aggregator_dir)
        grant = self.fleet.add_aggregator(card.read_bytes())
        aggregator_membership.join(self.aggregator_dir, grant.read_bytes(), self.fleet.fingerprint)
        self.workers: tuple[str, ...] = tuple(f"worker-{n}" for n in range(shards)) if shards > 1 else ()
        for name in self.workers:
            card = worker_membership.init(self.worker_dir(name), name)
            grant = self.fleet.add_helper(WORKER_ROLE, card.read_bytes())
            worker_membership.join(self.worker_dir(name), grant.read_bytes(), self.fleet.fingerprint)
        self.keeper = keeper
        if keeper:
            card = keeper_daemon.init(self.keeper_dir, keeper)
            grant = self.fleet.add_helper(KEEPER_ROLE, card.read_bytes())
            worker_membership.join(self.keeper_dir, grant.read_bytes(), self.fleet.fingerprint)
        for name in devices:
            self.add_device(name)

    @property
    def keeper_dir(self) -> Path:
        """The keeper's directory."""
        return self.root / "keeper"

    @property
    def _helper_dirs(self) -> tuple[Path, ...]:
        return (*map(self.worker_dir, self.workers), *([self.keeper_dir] if self.keeper else []))

    def worker_dir(self, name: str) -> Path:
        """Return the directory of one of the aggregator's workers."""
        return self.root / "workers" / name

    def copy_to(self, root: Path) -> Stage:
        """Return a copy of all directories under ``root``, which must not exist: what a backup restores; no program runs."""
        shutil.copytree(self.root, root)
        copied = copy.copy(self)
        copied.root, copied.aggregator_dir, copied.programs = root, root / self.aggregator_dir.name, {}
        copied.fleet = FleetDirectory(root / self.fleet.path.name)
        return copied

    def device_dir(self, name: str) -> Path:
        """Return a device's directory."""
        return self.root / "devices" / name

    def log_of(self, name: str) -> Path:
        """Return the log file of a program, which its later starts continue; it is made at the first."""
        return self.root / "logs" / f"{name}.log"

    def add_device(self, name: str) -> None:
        """Carry a new device's card to the owner, its grant back, and the new roster to the aggregator."""
        card = enrolment.init(self.device_dir(name), name)
        grant = self.fleet.add_device(card.read_bytes())
        enrolment.join(self.device_dir(name), grant.read_bytes(), self.fleet.fingerprint)
        self.carry_roster()
        self.devices = (*self.devices, name)

    def carry_roster(self) -> None:
        """Carry the newest roster to the aggregator, its workers and its keeper."""
        for folder in (self.aggregator_dir, *self._helper_dirs):
            # A running aggregator may read the roster at any time.
            write_atomic(folder / ROSTER_FILE, self.fleet.roster_bytes, durable=False, sync_name=False)

    def add_run(
        self, bundle: TaskBundle, origins: NDArray[np.float32], options: Recipe, schedule: Schedule | None = None
    ) -> RunPlan:
        """Sign a run or a standing order and carry it to the aggregator."""
        keeper = self.fleet.keeper(self.keeper) if self.keeper else None
        chosen = options if keeper is None else with_keeper(options)
        plan = make_plan(self.fleet, bundle, chosen, earlier=len(origins), schedule=schedule, keeper=keeper)
        path = write_run(self.fleet, plan, bundle, origins)
        for folder in (self.aggregator_dir, *self._helper_dirs):
            write_atomic(folder / "runs" / path.name, path.read_bytes(), durable=False, sync_name=False)
        return plan

    def start_aggregator(self, *arguments: str) -> Program:
        """Start `shoal-aggregator serve`."""
        return self._start("aggregator", "aggregator", ["serve", str(self.aggregator_dir), *arguments])

    def start_keeper(self, *arguments: str) -> Program:
        """Start `shoal-keeper serve`."""
        return self._start(self.keeper, "keeper", ["serve", str(self.keeper_dir), *arguments])

    def start_device(self, name: str, data: Path, *arguments: str) -> Program:
        """Start `shoal-edge run`."""
        return self._start(name, "edge_client", ["run", str(self.device_dir(name)), "--data", str(data), *arguments])

    def _start(self, name: str, package: str, arguments: list[str]) -> Program:
        log = self.log_of(name)
        log.parent.mkdir(exist_ok=True)
        handle = log.open("ab")  # append: a restarted program continues the log of its predecessor
        process = self._launch(name, package, arguments, handle)
        program = self.programs[name] = Program(name, process, log, handle)
        return program

    def _launch(self, name: str, package: str, arguments: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start a program in an interpreter of its own, with its output in ``log``."""
        start, folder, variables = self._software(name, package)
        return subprocess.Popen(
            [sys.executable, "-c", start, *arguments],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **ONE_THREAD, "NO_COLOR": "1", **variables},
            preexec_fn=_end_with_parent,  # noqa: PLW1509 - one prctl call, no Python lock is taken
        )

    def _software(self, _name: str, package: str) -> tuple[str, Path | None, dict[str, str]]:
        """Return the Python code that starts a program, the folder to start it in, and environment variables."""
        return f"from {PROGRAMS[package]} import main; main()", None, {}

    def records(self, run: int) -> list[dict[str, Any]]:
        """Return the closed rounds of a run."""
        return read_records(self.aggregator_dir / f"run-{run:06d}")

    def closed(self, run: int) -> int:
        """Return the number of a run's last closed round; 0 before the first."""
        return rounds_closed(self.aggregator_dir / f"run-{run:06d}")

    def finished(self, run: int) -> bool:
        """Return whether the run's final round is closed."""
        last = read_last_record(self.aggregator_dir / f"run-{run:06d}")
        return last is not None and bool(last["final"])

    def wait(self, run: int, timeout_s: float) -> list[dict[str, Any]]:
        """Wait until the run is finished and return its rounds.

        Raises:
            StageError: the run took longer than ``timeout_s``, or a program ended.
        """
        end = time.monotonic() + timeout_s
        while not self.finished(run):
            self.check()
            if time.monotonic() > end:
                raise StageError(f"run {run} did not finish in {timeout_s:g} s\n{self.programs['aggregator'].tail()}")
            time.sleep(0.05)
        return self.records(run)

    def check(self) -> None:
        """Raise StageError if a program has ended by itself."""
        for program in self.programs.values():
            code = program.process.poll()
            if code is not None:
                raise StageError(f"{program.name} ended with status {code}:\n{program.tail()}")

    def device_status(self, name: str) -> dict[str, Any]:
        """Return the contents of a device's status file; empty without one."""
        return DeviceState(self.device_dir(name)).load_status() or {}

    def stop(self, name: str, number: int = signal.SIGTERM) -> int:
        """Stop one program, remove it from ``programs``, and return its exit status."""
        return self.programs.pop(name).stop(number)

    def close(self) -> None:
        """Send SIGTERM to all programs at once, then wait for each."""
        for program in self.programs.values():
            if program.process.poll() is None:
                program.process.send_signal(signal.SIGTERM)
        for program in self.programs.values():
            program.stop()
        self.programs.clear()


def _end_with_parent() -> None:
    """Ask the kernel, in the child before exec, to end it with its parent, so that a killed demo leaves no processes."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
