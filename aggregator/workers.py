"""Threads beside the aggregator's loop: for the disk, for uploads that arrive, and for numerics that take long.

A job works on values that do not change, or on objects that say that any thread may use them. Its result comes back to the
driver's own thread, where all other state is changed. An error of a job is raised there too, where it ends the program.

`InlineWorkers` runs each job at once, so drivers without threads, and tests, take the same path as the daemon.

Example::

    workers = ThreadWorkers(inbox.put, "shoal-intake", threads=2)
    workers.submit(lambda: verify(upload), store_and_answer, key=device)

Threads and not processes: the libraries for hashes, seals and products release the interpreter, and a thread takes an upload
without a copy (ADR 45).
"""

from __future__ import annotations

import math
import queue
import threading
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

T = TypeVar("T")
HandBack = Callable[[Callable[[], None]], None]
"""Queues a function that the driver's thread then calls."""
INTAKE_BYTES: Final = 8 << 20
"""Most bytes of uploads that wait for the intake's threads or are in their hands; a single larger upload is taken alone."""
INTAKE_THREADS: Final = 4
"""Most threads for uploads. Each upload also takes time of the interpreter, which one thread has at a time."""


class Workers(Protocol):
    """Runs jobs beside the driver's thread, or at once on it."""

    def submit(
        self, job: Callable[[], T], done: Callable[[T], None] | None = None, *, key: str = "", size: int = 0
    ) -> None:
        """Run ``job``, then have ``done`` called with its result on the driver's own thread.

        Args:
            job: what to do; must not wait for the driver's thread, which may wait for room.
            done: takes the result; None if nobody needs it.
            key: jobs with one key are run, and called back, in the order of submission.
            size: bytes that the job holds; `submit` waits until there is room for them.
        """

    def close(self) -> None:
        """Finish the submitted jobs and stop; no ``done`` takes effect afterwards."""


class InlineWorkers:
    """Runs each job at once on the caller's thread."""

    def submit(self, job: Callable[[], T], done: Callable[[T], None] | None = None, **_order: object) -> None:
        """Run ``job`` and ``done``."""
        result = job()
        if done is not None:
            done(result)

    def close(self) -> None:
        """Do nothing: every job has finished."""


_Item = tuple[Callable[[], Any], Callable[[Any], None] | None, int]


class ThreadWorkers:
    """Runs jobs on threads of its own.

    Each thread has a queue, and a key belongs to one thread: that keeps the order of a key without any waiting.

    Args:
        hand_back: queues a function that the driver's thread then calls; an error of a job is raised by it.
        name: of the threads.
        threads: their number.
        most_bytes: of the jobs that are not finished; see `Workers.submit`.
    """

    def __init__(self, hand_back: HandBack, name: str, *, threads: int = 1, most_bytes: float = math.inf) -> None:
        self._hand_back = hand_back
        self._most_bytes = most_bytes
        self._held_bytes = 0
        self._room = threading.Condition()
        self._closed = False
        self._queues: list[queue.SimpleQueue[_Item | None]] = [queue.SimpleQueue() for _ in range(threads)]
        self._threads = [
            threading.Thread(target=self._run, args=(jobs,), name=f"{name}-{number}", daemon=True)
            for number, jobs in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def submit(
        self, job: Callable[[], T], done: Callable[[T], None] | None = None, *, key: str = "", size: int = 0
    ) -> None:
        """Queue ``job`` for the thread of ``key``; wait for room first if there is none."""
        if size:
            with self._room:
                self._room.wait_for(lambda: not self._held_bytes or self._held_bytes + size <= self._most_bytes)
                self._held_bytes += size
        self._queues[zlib.crc32(key.encode()) % len(self._queues)].put((job, done, size))

    def close(self) -> None:
        """Finish the queued jobs. Functions that the driver has not called yet do nothing from now on."""
        self._closed = True
        for jobs in self._queues:
            jobs.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, jobs: queue.SimpleQueue[_Item | None]) -> None:
        while (item := jobs.get()) is not None:
            job, done, size = item
            try:
                result = job()
            except Exception as error:  # noqa: BLE001 - raised again on the driver's thread
                self._hand_back(self._unless_closed(_raise, error))
            else:
                if done is not None:
                    self._hand_back(self._unless_closed(done, result))
                del result
            # The upload that the job held is freed before there is room for the next one.
            del item, job, done
            if size:
                with self._room:
                    self._held_bytes -= size
                    self._room.notify()

    def _unless_closed(self, done: Callable[[T], None], result: T) -> Callable[[], None]:
        """Return a function that calls ``done`` unless the workers are closed by then, as the run's store may be too."""

        def call() -> None:
            if not self._closed:
                done(result)

        return call


def _raise(error: Exception) -> None:
    raise error


@dataclass(frozen=True, slots=True)
class RunWorkers:
    """The workers of one run.

    Attributes:
        disk: waits for the disk, one commit at a time.
        intake: verifies, opens and writes uploads, and seals the answers.
        numerics: closes rounds, if that takes long.
    """

    disk: Workers = field(default_factory=InlineWorkers)
    intake: Workers = field(default_factory=InlineWorkers)
    numerics: Workers = field(default_factory=InlineWorkers)

    @classmethod
    def threads(cls, hand_back: HandBack, cores: int) -> RunWorkers:
        """Return threads for a process that may use ``cores`` cores; on one core uploads stay on the driver's thread."""
        return cls(
            ThreadWorkers(hand_back, "shoal-disk"),
            intake_workers(hand_back, cores),
            ThreadWorkers(hand_back, "shoal-numerics"),
        )

    def close(self) -> None:
        """Finish the submitted jobs and stop."""
        for workers in (self.intake, self.numerics, self.disk):
            workers.close()


def intake_workers(hand_back: HandBack, cores: int) -> Workers:
    """Return the workers for uploads: none beside the driver's thread on one core, else a thread for each core."""
    if cores == 1:
        return InlineWorkers()
    return ThreadWorkers(hand_back, "shoal-intake", threads=min(cores, INTAKE_THREADS), most_bytes=INTAKE_BYTES)
