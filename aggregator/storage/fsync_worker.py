"""Run fsync outside of the event loop, so that uploads are opened while earlier ones become durable.

Jobs are run one after another in the order of submission. A disk error is raised on the driver's thread, where it ends the
program.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

Job = Callable[[], None]


class FsyncWorker(Protocol):
    """Runs one slow job at a time."""

    def submit(self, job: Job, done: Job) -> None:
        """Run ``job``, then have ``done`` called on the driver's own thread."""

    def close(self) -> None:
        """Finish the submitted jobs and stop; no ``done`` takes effect afterwards."""


class InlineSyncer:
    """Runs each job at once on the caller's thread, for drivers without threads."""

    def submit(self, job: Job, done: Job) -> None:
        """Run ``job`` and ``done``."""
        job()
        done()

    def close(self) -> None:
        """Do nothing: every job has finished."""


class ThreadSyncer:
    """Runs jobs on a thread of its own.

    Args:
        hand_back: queues a function that the driver's thread then calls; a job's error is raised by it.
    """

    def __init__(self, hand_back: Callable[[Job], None]) -> None:
        self._hand_back = hand_back
        self._closed = False
        self._jobs: queue.SimpleQueue[tuple[Job, Job] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="shoal-sync", daemon=True)
        self._thread.start()

    def submit(self, job: Job, done: Job) -> None:
        """Queue ``job``."""
        self._jobs.put((job, done))

    def close(self) -> None:
        """Finish the queued jobs. Functions that the driver has not called yet do nothing from now on."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done = item
            try:
                job()
            except OSError as error:
                self._hand_back(self._unless_closed(_raiser(error)))
            else:
                self._hand_back(self._unless_closed(done))

    def _unless_closed(self, done: Job) -> Job:
        """Return a function that calls ``done`` unless the worker is closed by then, as its store may be too."""

        def call() -> None:
            if not self._closed:
                done()

        return call


def _raiser(error: OSError) -> Job:
    def fail() -> None:
        raise error

    return fail
