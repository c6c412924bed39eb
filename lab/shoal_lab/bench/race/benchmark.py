"""The race: start all systems, let them take turns, and compare CPU time, accuracy and memory."""

from __future__ import annotations

import json
import os
import select
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
from numpy.typing import NDArray

import shoal
import shoal_lab
from shoal.errors import ConfigError, IntegrityError
from shoal.util.files import write_atomic
from shoal_lab.bench.race.tasks import DEVICES, GO, SAMPLES, TASKS, Task, Work
from shoal_lab.experiments.data import datasets
from shoal_lab.experiments.data.datasets import cache_dir

SHOAL: Final = "shoal"
SYSTEMS: Final[Mapping[str, str]] = {
    SHOAL: "shoal_simulator",
    "torch": "plain",
    "pfl-research": "pfl_research",
    "flower": "flower",
}
"""The systems, Shoal's first, and the modules in `systems` that run them."""
WARM_UP: Final = 1
"""First rounds that do not count: libraries are loaded, and what is kept between rounds is computed."""
SEED: Final = 0
"""Of the devices' samples and the starting models."""
ROUND_S: Final = 600.0
"""Most seconds of a round."""
END_S: Final = 30.0
"""Most seconds that a program takes to end after its input has ended."""
AGREE_POINTS: Final = 4.0
"""Most percentage points between the accuracies of two systems after the same rounds. Seeds differ by up to 3 for the CNN, whose
accuracy still rises by some points a round."""
TESTED: Final = 2000
"""Test images of a task with large ones."""
LEARNT: Final = 0.5
"""Least accuracy of a model that has learnt from these data; below, that two systems agree says nothing."""
ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SAID_BYTES: Final = 4096
"""Length of the end of a program's standard error that is searched for a reason."""

Row = dict[str, Any]


class _StoppedError(Exception):
    """A program ended early, or did not answer; the text says why."""


def measure(
    *,
    tasks: Iterable[str] = tuple(TASKS),
    systems: Sequence[str] = tuple(SYSTEMS),
    rounds: int,
    install: bool = False,
    progress: Callable[[str], None],
) -> dict[str, Any]:
    """Run the race; return the JSON object of ``shoal bench race``.

    A row is a system on a task: the CPU seconds of all its processes, the median of the rounds that count; their ratio to
    Shoal's, round by round, the median, since rounds that follow each other meet the same load; the share of the test samples
    that the last model gets right; and the largest memory of its main process. ``skipped`` names the systems that could not
    run, and why.

    Args:
        tasks: names, in `tasks.TASKS`.
        systems: names, in `SYSTEMS`, Shoal's among them.
        rounds: rounds that count.
        install: make the peers' environments where they are missing.
        progress: is told of each round.

    Raises:
        DataError: MNIST is not here.
        IntegrityError: Shoal's own program failed, or the accuracies say that systems do not do the same work.
    """
    pythons, missing = _pythons(systems, install, progress)
    rows: list[Row] = []
    skipped = [
        {"system": system, "task": task, "reason": reason} for system, reason in missing.items() for task in tasks
    ]
    with tempfile.TemporaryDirectory(prefix="shoal-race-") as place:
        for name in tasks:
            path = Path(place) / f"{name}.npz"
            work(TASKS[name]).save(path)
            answers, stopped = _race(TASKS[name], path, pythons, rounds + WARM_UP, progress)
            rows += rows_of(name, answers)
            skipped += stopped
    return {
        "rows": rows,
        "skipped": skipped,
        "samples": SAMPLES,
        "rounds": rounds,
        "seed": SEED,
        "peers": {peer: list(requirements(peer)) for peer in systems if peer in PEERS},
    }


def work(task: Task) -> Work:
    """Return a task's work: samples drawn from MNIST, and a model as torch initialises it."""
    from shoal_lab.bench.race.systems.shoal_simulator import network

    mnist, devices = datasets.load("mnist"), min(DEVICES, task.devices)
    chosen = np.random.default_rng(SEED).permutation(len(mnist.y_train))[: devices * SAMPLES]
    tested = slice(TESTED if task.coloured else None)
    return Work(
        task=task,
        x=_images(mnist.x_train[chosen], task).reshape(devices, SAMPLES, -1),
        y=mnist.y_train[chosen].reshape(devices, SAMPLES),
        x_test=_images(mnist.x_test[tested], task),
        y_test=mnist.y_test[tested],
        theta=network(task).init(SEED),
    )


def _images(grey: NDArray[np.float32], task: Task) -> NDArray[np.float32]:
    """Return images (n, ...) of 28x28 as a task has them, (n, pixels)."""
    if task.coloured:
        padded = np.pad(grey.reshape(-1, 1, 28, 28), ((0, 0), (0, 0), (2, 2), (2, 2)))
        grey = np.repeat(padded, 3, axis=1)
    return grey.reshape(len(grey), -1)


def _pythons(
    systems: Sequence[str], install: bool, progress: Callable[[str], None]
) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the Python of each system, and the reason of each that has none."""
    found, missing = {}, {}
    for system in systems:
        try:
            if system not in PEERS:
                found[system] = Path(sys.executable)
            else:
                found[system] = install_peer(system, progress) if install else python_of(system)
        except MissingPeerError as error:
            missing[system] = f"{error} ({error.hint})" if error.hint else str(error)
    return found, missing


def _race(
    task: Task, path: Path, pythons: Mapping[str, Path], rounds: int, progress: Callable[[str], None]
) -> tuple[dict[str, list[dict[str, float]]], list[Row]]:
    """Return the answers of each system that ended: one a round, and that at the end; and the others with their reasons."""
    skipped = []
    answers: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(program(name, python, path, task, rounds)) for name, python in pythons.items()
        }
        for round_ in range(1, rounds + 1):
            for name in list(answers):
                try:
                    answers[name].append(running[name].round())
                    if round_ == rounds:
                        answers[name].append(running[name].answer())
                except _StoppedError as stopped:
                    if name == SHOAL:
                        raise IntegrityError(f"Shoal's simulator failed on {task.name}: {stopped}") from stopped
                    skipped.append({"system": name, "task": task.name, "reason": str(stopped)})
                    del answers[name]
            progress(f"{task.name}: round {round_} of {rounds}, the first {WARM_UP} to warm up")
    return answers, skipped


def rows_of(task: str, answers: Mapping[str, Sequence[Mapping[str, float]]]) -> list[Row]:
    """Return a row for each system, from its answers to each round and at the end.

    Raises:
        IntegrityError: Shoal has learnt nothing, or a system is too far from it.
    """
    ours = answers[SHOAL]
    if ours[-1]["accuracy"] < LEARNT:
        raise IntegrityError(f"Shoal's {task} has learnt nothing", hint="give more rounds")
    rows = []
    for name, found in answers.items():
        apart = 100 * abs(found[-1]["accuracy"] - ours[-1]["accuracy"])
        if apart > AGREE_POINTS:
            raise IntegrityError(
                f"after the same rounds {name} is {apart:.1f} points from Shoal on {task}: they do not do the same work"
            )
        counted, own = ([answer["cpu_s"] for answer in given[WARM_UP:-1]] for given in (found, ours))
        rows.append(
            {
                "system": name,
                "task": task,
                "devices": min(DEVICES, TASKS[task].devices),
                "cpu_seconds_per_round": statistics.median(counted),
                "ratio": statistics.median(theirs / mine for theirs, mine in zip(counted, own, strict=True)),
                **found[-1],
            }
        )
    return rows


class _Program:
    """A system's running program."""

    def __init__(self, process: subprocess.Popen[bytes], errors: IO[bytes]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        self._in, self._out, self._errors = process.stdin, process.stdout, errors

    def round(self) -> dict[str, float]:
        """Let it train a round; return its answer.

        Raises:
            _StoppedError: it ended instead, or took too long.
        """
        try:
            self._in.write(GO.encode())
        except OSError:
            raise _StoppedError(self._reason()) from None
        return self.answer()

    def answer(self) -> dict[str, float]:
        """Return the next line of its output.

        Raises:
            _StoppedError: as for `round`.
        """
        if not select.select([self._out], [], [], ROUND_S)[0]:
            raise _StoppedError(f"no answer within {ROUND_S:g} s")
        line = self._out.readline()
        if not line:
            raise _StoppedError(self._reason())
        values: dict[str, float] = json.loads(line)
        return values

    def _reason(self) -> str:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _SAID_BYTES))
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else "its program ended"


@contextmanager
def program(name: str, python: Path, path: Path, task: Task, rounds: int) -> Iterator[_Program]:
    """Run a system's program; it is ended with the block."""
    sources = os.pathsep.join(str(Path(str(package.__file__)).parent.parent) for package in (shoal, shoal_lab))
    environment = {**os.environ, **dict.fromkeys(ONE_THREAD, "1"), "PYTHONPATH": sources}
    module = f"shoal_lab.bench.race.systems.{SYSTEMS[name]}"
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            [str(python), "-m", module, str(path), task.name, str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            bufsize=0,  # two answers may come at once, and `select` knows nothing of a buffer
            env=environment,
        ) as process,
    ):
        try:
            yield _Program(process, errors)
        finally:
            # At the end of its input a program ends by itself, and with it the processes that it has started.
            process.stdin.close()  # type: ignore[union-attr]
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()


def words(data: Mapping[str, Any]) -> list[str]:
    """Return the data as a table."""
    text = [f"{'task':14}{'system':14}{'CPU s a round':>14}{'ratio':>8}{'accuracy':>10}{'peak MB':>9}"]
    for row in data["rows"]:
        text.append(
            f"{row['task']:14}{row['system']:14}{row['cpu_seconds_per_round']:14.3f}{row['ratio']:8.1f}"
            f"{100 * row['accuracy']:9.1f}%{row['peak_mb']:9.0f}"
        )
    reasons = {(each["system"], each["reason"]) for each in data["skipped"]}
    return text + [f"skipped {system}: {reason}" for system, reason in sorted(reasons)]


PEERS: Final[Mapping[str, str]] = {
    "pfl-research": "pfl==0.6.0",
    "flower": "flwr[simulation]==1.41.0",
    "flower-fleet": "flwr==1.42.0",
}
"""What pip installs for each peer, besides the torch that Shoal has; `bench.beside` runs the last."""
INSTALL_S: Final = 1800.0
"""Most seconds of an installation."""
_READY: Final = "ready.txt"


class MissingPeerError(ConfigError):
    """A peer's environment is not there, or could not be made."""


def folder(peer: str) -> Path:
    """Return the folder of a peer's environment."""
    return cache_dir() / "race" / peer


def requirements(peer: str) -> tuple[str, ...]:
    """Return what a peer's environment has: the peer, psutil, which counts CPU time, and the same torch as Shoal's."""
    return PEERS[peer], "psutil", "torch==" + version("torch").partition("+")[0]


def python_of(peer: str) -> Path:
    """Return the Python of a peer's environment.

    Raises:
        MissingPeerError: it is not there, or has another version of the peer or of torch.
    """
    ready = folder(peer) / _READY
    wanted = " ".join(requirements(peer))
    if not ready.is_file() or ready.read_text() != wanted:
        raise MissingPeerError(f"{wanted} is not installed in {folder(peer)}", hint="give --install")
    return folder(peer) / "bin" / "python"


def install_peer(peer: str, progress: Callable[[str], None]) -> Path:
    """Make a peer's environment unless it is there; return its Python.

    Raises:
        MissingPeerError: pip can't install it.
    """
    try:
        return python_of(peer)
    except MissingPeerError:
        pass
    place, wanted = folder(peer), requirements(peer)
    progress(f"installing {' '.join(wanted)} in {place}")
    shutil.rmtree(place, ignore_errors=True)
    try:
        _run([sys.executable, "-m", "venv", str(place)])
        _run([str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *wanted])
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(place, ignore_errors=True)
        said = getattr(error, "stderr", None) or str(error)
        reason = said.strip().splitlines()[-1] if said.strip() else "no reason given"
        raise MissingPeerError(
            f"{' '.join(wanted)} can't be installed: {reason}",
            hint="pip needs a package index: check the network, or name an index in PIP_INDEX_URL",
        ) from error
    write_atomic(place / _READY, " ".join(wanted).encode())
    return python_of(peer)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
