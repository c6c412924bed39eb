"""Carry out orders beside the event loop, so that training never starves the connection.

A new job replaces the one before it, and a result is a value. The aggregator's thread for the disk
(`aggregator.storage.fsync_worker`) finishes every job in order and raises errors on the driver's thread, so the two share no
code. `ThreadPoolExecutor` fits neither: at exit it waits for the job under way, here a training of minutes.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Protocol

from edge_client.learning.training import Cancelled
from edge_client.learning.update import Finished
from shoal.errors import ShoalError

Cancel = Callable[[], bool]
Job = Callable[[Cancel], Finished]
Result = Finished | ShoalError
Done = Callable[[Result], None]


class Worker(Protocol):
    """Carries out one job at a time."""

    def submit(self, job: Job, done: Done) -> None:
        """Carry ``job`` out and hand its result, or its error, to ``done``; a cancelled job hands over nothing."""

    def cancel(self) -> None:
        """Ask the job under way to stop."""

    def close(self) -> None:
        """Stop for good."""


def run_job(job: Job, cancelled: Cancel, done: Done) -> None:
    """Run ``job`` here and now."""
    try:
        result: Result = job(cancelled)
    except Cancelled:
        return
    except ShoalError as error:
        result = error
    if not cancelled():
        done(result)


class ThreadWorker:
    """One thread; ONNX Runtime releases the interpreter while it computes."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Done, threading.Event] | None] = queue.SimpleQueue()
        self._current = threading.Event()
        self._thread = threading.Thread(target=self._run, name="shoal-work", daemon=True)
        self._thread.start()

    def submit(self, job: Job, done: Done) -> None:
        """Queue ``job``; whatever came before it is cancelled."""
        self._current.set()
        self._current = threading.Event()
        self._jobs.put((job, done, self._current))

    def cancel(self) -> None:
        """Ask the job under way to stop before its next step."""
        self._current.set()

    def close(self) -> None:
        """Cancel and end the thread."""
        self.cancel()
        self._jobs.put(None)
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while (item := self._jobs.get()) is not None:
            job, done, cancelled = item
            run_job(job, cancelled.is_set, done)
            del item, job, done  # they hold models and a mask, which must not live on while this waits for the next


class InlineWorker:
    """Runs jobs when the driver says so: the loopback fleet's worker."""

    def __init__(self) -> None:
        self._waiting: tuple[Job, Done] | None = None

    def submit(self, job: Job, done: Done) -> None:
        """Keep ``job`` until `work`."""
        self._waiting = (job, done)

    def cancel(self) -> None:
        """Drop the waiting job."""
        self._waiting = None

    def work(self) -> bool:
        """Carry out the waiting job, if there is one; return whether there was."""
        if self._waiting is None:
            return False
        (job, done), self._waiting = self._waiting, None
        run_job(job, lambda: False, done)
        return True

    def close(self) -> None:
        """Drop the waiting job."""
        self._waiting = None
