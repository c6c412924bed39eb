"""Run jobs in a second thread, so that training does not block the event loop and its connection.

A new job replaces the one before it, and a result is a value. The aggregator's threads (`aggregator.workers`) finish every job
in order and raise errors on the driver's thread, so the two share no code. `ThreadPoolExecutor` fits neither: at exit it waits
for the running job, and a training takes minutes.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from edge_client.learning.training import Cancelled
from edge_client.learning.update import Finished
from shoal.errors import ShoalError

T = TypeVar("T")
Cancel = Callable[[], bool]
Job = Callable[[Cancel], Finished]
Result = Finished | ShoalError
LOWEST_PRIORITY: Final = 19
"""Nice value of a thread that works when no other program wants the processor.

Not SCHED_IDLE: on a busy device such a thread may stop for seconds while it holds the interpreter, and the event loop waits.
"""


class Worker(Protocol):
    """Runs one job at a time."""

    def submit(self, job: Callable[[Cancel], T], done: Callable[[T | ShoalError], None]) -> None:
        """Run ``job`` and call ``done`` with its result or error; for a cancelled job ``done`` is not called."""

    def cancel(self) -> None:
        """Ask the running job to stop."""

    def close(self) -> None:
        """Stop the worker; it can't be used again."""


def run_job(job: Callable[[Cancel], T], cancelled: Cancel, done: Callable[[T | ShoalError], None]) -> None:
    """Run ``job`` in the calling thread."""
    result: T | ShoalError
    try:
        result = job(cancelled)
    except Cancelled:
        return
    except ShoalError as error:
        result = error
    if not cancelled():
        done(result)


class ThreadWorker:
    """One thread; ONNX Runtime releases the interpreter while it computes, numpy in each operator that takes long.

    Args:
        nice: the thread's nice value, 0 for that of the process; Linux has one for each thread.
    """

    def __init__(self, *, nice: int = 0) -> None:
        self._nice = nice
        self._jobs: queue.SimpleQueue[tuple[Callable[[Cancel], Any], Callable[[Any], None], threading.Event] | None] = (
            queue.SimpleQueue()
        )
        self._current = threading.Event()
        self._sign_s: float | None = None
        self._thread = threading.Thread(target=self._run, name="shoal-work", daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[Cancel], T], done: Callable[[T | ShoalError], None]) -> None:
        """Queue ``job`` and cancel all earlier ones."""
        self._current.set()
        # One event for each job: to clear a shared one would revive the job that it cancelled.
        self._current = threading.Event()
        self._jobs.put((job, done, self._current))

    def cancel(self) -> None:
        """Ask the running job to stop before its next step."""
        self._current.set()

    def close(self) -> None:
        """Cancel and end the thread."""
        self.cancel()
        self._jobs.put(None)
        self._thread.join(timeout=10)

    def quiet_s(self) -> float:
        """Return the seconds since the job under way began or took a step; 0 without a job."""
        sign_s = self._sign_s
        return 0.0 if sign_s is None else time.monotonic() - sign_s

    def _run(self) -> None:
        if self._nice:
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._nice)
        while (item := self._jobs.get()) is not None:
            job, done, cancelled = item
            self._sign_s = time.monotonic()
            run_job(job, partial(self._is_cancelled, cancelled), done)
            self._sign_s = None
            del item, job, done  # free their models and mask before the wait for the next job

    def _is_cancelled(self, cancelled: threading.Event) -> bool:
        self._sign_s = time.monotonic()
        return cancelled.is_set()
