"""The race: start all systems, let them take turns, and compare CPU time, accuracy and memory."""

from __future__ import annotations

import dataclasses
import json
import os
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Final

import numpy as np

import shoal
from shoal.errors import IntegrityError, UsageError
from shoal_lab.bench.race import environments
from shoal_lab.bench.race.environments import MissingPeerError
from shoal_lab.bench.race.tasks import DEVICES, SAMPLES, TASKS, Task, Work
from shoal_lab.bench.race.turns import GO
from shoal_lab.experiments.data import datasets

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
FEWEST_ROUNDS: Final = 2
ROUND_S: Final = 600.0
"""Most seconds of a round."""
END_S: Final = 30.0
"""Most seconds that a program takes to end after its input has ended."""
AGREE_POINTS: Final = 4.0
"""Most percentage points between the accuracies of two systems after the same rounds. Seeds differ by up to 3 for the CNN, whose
accuracy still rises by some points a round."""
LEARNT: Final = 0.5
"""Least accuracy of a model that has learnt from these data; below, that two systems agree says nothing."""
ONE_THREAD: Final = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_SAID_BYTES: Final = 4096
"""Length of the end of a program's standard error that is searched for a reason."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The choices of a race.

    Attributes:
        tasks: names, in `tasks.TASKS`; systems: names, in `SYSTEMS`, Shoal's among them.
        rounds: rounds that count.
        install: make the peers' environments where they are missing.
        data_dir: folder that is searched first for MNIST.
        seed: of the devices' samples and the starting models.
    """

    tasks: tuple[str, ...] = tuple(TASKS)
    systems: tuple[str, ...] = tuple(SYSTEMS)
    rounds: int = 12
    install: bool = False
    data_dir: Path | None = None
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A system on a task.

    Attributes:
        cpu_seconds_per_round: of all its processes, the median of the rounds that count.
        ratio: that time in units of Shoal's, round by round, the median: rounds that follow each other meet the same load.
        accuracy: share of the test samples that the model after the last round gets right.
        peak_mb: largest memory of its main process.
    """

    system: str
    task: str
    cpu_seconds_per_round: float
    ratio: float
    accuracy: float
    peak_mb: float


@dataclass(frozen=True, slots=True)
class Skipped:
    """A system that could not run, and why."""

    system: str
    task: str
    reason: str


@dataclass(frozen=True, slots=True)
class _Answers:
    """A program's answers: CPU seconds of each round, and accuracy and memory at the end."""

    cpu_s: list[float]
    end: Mapping[str, float]


class _StoppedError(Exception):
    """A program ended early, or did not answer; the text says why."""


def measure(options: Options, progress: Callable[[str], None]) -> tuple[list[Row], list[Skipped]]:
    """Run the race.

    Raises:
        UsageError: there is no such task or system, or too few rounds.
        DataError: MNIST is not here.
        IntegrityError: Shoal's own program failed, or the accuracies say that systems do not do the same work.
    """
    _check(options)
    pythons, skipped = _pythons(options, progress)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="shoal-race-") as place:
        for name in options.tasks:
            path = Path(place) / f"{name}.npz"
            work(TASKS[name], options.data_dir, options.seed).save(path)
            found, missing = _race(TASKS[name], path, pythons, options, progress)
            rows += found
            skipped += missing
    return rows, skipped


def _check(options: Options) -> None:
    for kind, chosen, known in (("task", options.tasks, TASKS), ("system", options.systems, SYSTEMS)):
        if unknown := [name for name in chosen if name not in known]:
            raise UsageError(f"no {kind} {unknown[0]!r}", hint=f"there are {', '.join(known)}")
    if SHOAL not in options.systems:
        raise UsageError("times are compared with Shoal's", hint=f"add --system {SHOAL}")
    if options.rounds < FEWEST_ROUNDS:
        raise UsageError(f"{options.rounds} rounds", hint=f"give at least {FEWEST_ROUNDS}")


def work(task: Task, data_dir: Path | None, seed: int) -> Work:
    """Return a task's work: samples drawn from MNIST, and a model as torch initialises it."""
    from shoal_lab.bench.race.systems.shoal_simulator import network

    mnist = datasets.load("mnist", data_dir)
    chosen = np.random.default_rng(seed).permutation(len(mnist.y_train))[: DEVICES * SAMPLES]
    return Work(
        task=task,
        x=mnist.x_train[chosen].reshape(DEVICES, SAMPLES, -1),
        y=mnist.y_train[chosen].reshape(DEVICES, SAMPLES),
        x_test=mnist.x_test.reshape(len(mnist.y_test), -1),
        y_test=mnist.y_test,
        theta=network(task).init(seed),
    )


def _pythons(options: Options, progress: Callable[[str], None]) -> tuple[dict[str, Path], list[Skipped]]:
    """Return the Python of each system, and the systems that have none."""
    found, skipped = {}, []
    for system in options.systems:
        try:
            if system not in environments.PEERS:
                found[system] = Path(sys.executable)
            elif options.install:
                found[system] = environments.install(system, progress)
            else:
                found[system] = environments.find(system)
        except MissingPeerError as error:
            reason = f"{error} ({error.hint})" if error.hint else str(error)
            skipped += [Skipped(system, task, reason) for task in options.tasks]
    return found, skipped


def _race(
    task: Task, path: Path, pythons: Mapping[str, Path], options: Options, progress: Callable[[str], None]
) -> tuple[list[Row], list[Skipped]]:
    rounds = options.rounds + WARM_UP
    skipped: list[Skipped] = []
    answers: dict[str, _Answers] = {name: _Answers([], {}) for name in pythons}
    with ExitStack() as stack:
        running = {
            name: stack.enter_context(_program(name, python, path, task, rounds)) for name, python in pythons.items()
        }
        for round_ in range(1, rounds + 1):
            for name in list(running):
                try:
                    answers[name].cpu_s.append(running[name].round()["cpu_s"])
                    if round_ == rounds:
                        answers[name] = dataclasses.replace(answers[name], end=running[name].answer())
                except _StoppedError as stopped:
                    if name == SHOAL:
                        raise IntegrityError(f"Shoal's simulator failed on {task.name}: {stopped}") from stopped
                    skipped.append(Skipped(name, task.name, str(stopped)))
                    del running[name], answers[name]
            progress(f"{task.name}: round {round_} of {rounds}, the first {WARM_UP} to warm up")
    return _rows(task, answers), skipped


def _rows(task: Task, answers: Mapping[str, _Answers]) -> list[Row]:
    ours = answers[SHOAL]
    if ours.end["accuracy"] < LEARNT:
        raise IntegrityError(f"Shoal's {task.name} has learnt nothing", hint="give more rounds")
    rows = []
    for name, found in answers.items():
        apart = 100 * abs(found.end["accuracy"] - ours.end["accuracy"])
        if apart > AGREE_POINTS:
            raise IntegrityError(
                f"after the same rounds {name} is {apart:.1f} points from Shoal on {task.name}: they do not do the same work"
            )
        counted = found.cpu_s[WARM_UP:]
        ratios = [theirs / own for theirs, own in zip(counted, ours.cpu_s[WARM_UP:], strict=True)]
        rows.append(
            Row(
                system=name,
                task=task.name,
                cpu_seconds_per_round=statistics.median(counted),
                ratio=statistics.median(ratios),
                accuracy=found.end["accuracy"],
                peak_mb=found.end["peak_mb"],
            )
        )
    return rows


class _Program:
    """A system's running program."""

    def __init__(self, process: subprocess.Popen[str], errors: IO[bytes]) -> None:
        self._process, self._errors = process, errors

    def round(self) -> dict[str, float]:
        """Let it train a round; return its answer.

        Raises:
            _StoppedError: it ended instead, or took too long.
        """
        try:
            assert self._process.stdin is not None
            self._process.stdin.write(GO)
            self._process.stdin.flush()
        except OSError:
            raise _StoppedError(self._reason()) from None
        return self.answer()

    def answer(self) -> dict[str, float]:
        """Return the next line of its output.

        Raises:
            _StoppedError: as for `round`.
        """
        out = self._process.stdout
        assert out is not None
        until = time.monotonic() + ROUND_S
        if not select.select([out], [], [], max(0.0, until - time.monotonic()))[0]:
            raise _StoppedError(f"no answer within {ROUND_S:g} s")
        line = out.readline()
        if not line:
            raise _StoppedError(self._reason())
        values: dict[str, float] = json.loads(line)
        return values

    def _reason(self) -> str:
        self._errors.seek(max(0, self._errors.seek(0, os.SEEK_END) - _SAID_BYTES))
        said = self._errors.read().decode(errors="replace").strip().splitlines()
        return said[-1] if said else "its program ended"


@contextmanager
def _program(name: str, python: Path, path: Path, task: Task, rounds: int) -> Iterator[_Program]:
    """Run a system's program; it is ended with the block."""
    source = str(Path(shoal.__file__).parent.parent)
    environment = {**os.environ, **dict.fromkeys(ONE_THREAD, "1"), "PYTHONPATH": source}
    module = f"shoal_lab.bench.race.systems.{SYSTEMS[name]}"
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(
            [str(python), "-m", module, str(path), task.name, str(rounds)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
        try:
            yield _Program(process, errors)
        finally:
            # At the end of its input a program ends by itself, and with it the processes that it has started.
            process.stdin.close()  # type: ignore[union-attr]
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            process.stdout.close()  # type: ignore[union-attr]


def data(rows: Sequence[Row], skipped: Sequence[Skipped], options: Options) -> dict[str, Any]:
    """Return the JSON object of ``shoal bench race``."""
    return {
        "rows": [dataclasses.asdict(row) for row in rows],
        "skipped": [dataclasses.asdict(each) for each in skipped],
        "devices": DEVICES,
        "samples": SAMPLES,
        "rounds": options.rounds,
        "seed": options.seed,
        "peers": {
            peer: list(environments.requirements(peer)) for peer in options.systems if peer in environments.PEERS
        },
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return the data as a table."""
    text = [f"{'task':10}{'system':14}{'CPU s a round':>14}{'ratio':>8}{'accuracy':>10}{'peak MB':>9}"]
    for row in found["rows"]:
        text.append(
            f"{row['task']:10}{row['system']:14}{row['cpu_seconds_per_round']:14.3f}{row['ratio']:8.1f}"
            f"{100 * row['accuracy']:9.1f}%{row['peak_mb']:9.0f}"
        )
    reasons = {(each["system"], each["reason"]) for each in found["skipped"]}
    return text + [f"skipped {system}: {reason}" for system, reason in sorted(reasons)]
