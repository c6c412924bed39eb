"""Wait for the disk beside the event loop, so that uploads are opened while earlier ones become durable.

Every job is finished, in order, and an error of the disk is raised on the driver's thread, where it ends the program.
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
        """Finish what is under way, and stop; nothing that was submitted is called back afterwards."""


class InlineSyncer:
    """Runs jobs here and now: for drivers without threads."""

    def submit(self, job: Job, done: Job) -> None:
        """Run both."""
        job()
        done()

    def close(self) -> None:
        """Nothing is ever under way."""


class ThreadSyncer:
    """Runs jobs on a thread of its own.

    Args:
        hand_back: gives a callable to the driver's thread, which calls it; an error of the job is raised there.
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
        """Finish what is queued. What was handed back and not called yet, or fails from now on, does nothing when called."""
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
        """Return what calls ``done`` unless the syncer is closed by then: its store may be closed as well."""

        def call() -> None:
            if not self._closed:
                done()

        return call


def _raiser(error: OSError) -> Job:
    def fail() -> None:
        raise error

    return fail
