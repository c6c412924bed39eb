"""The worker's thread: it runs one job at a time, and holds no reference to a finished job."""

import gc
import os
import threading
import time
import weakref

import pytest
from shoal_lab.loopback.fleet import InlineWorker

from edge_client.learning.worker import LOWEST_PRIORITY, ThreadWorker


class Mask:
    """A stand-in for the objects that a job refers to: models, and the mask of an epoch."""


def submitted(worker, mask, done):
    worker.submit(lambda _cancelled: mask, lambda result: done(result is mask))


@pytest.mark.parametrize("kind", [ThreadWorker, InlineWorker])
def test_a_job_that_is_done_is_let_go(kind):
    """A device may wait days for its next assignment: the mask of a finished epoch must not stay in memory."""
    worker, mask, finished, results = kind(), Mask(), threading.Event(), []

    def done(result):
        results.append(result)
        finished.set()

    held = weakref.ref(mask)
    submitted(worker, mask, done)
    if kind is InlineWorker:
        assert worker.work()
    assert finished.wait(5)
    del mask
    for _ in range(100):
        gc.collect()
        if held() is None:
            break
        finished.clear()
        finished.wait(0.01)
    assert held() is None
    assert results == [True]
    worker.close()


def test_each_step_of_job_is_a_sign_of_life():
    step, ended = threading.Event(), threading.Event()

    def job(cancelled):
        while not step.wait(0.01):
            pass
        time.sleep(0.2)
        quiet.append(worker.quiet_s())
        cancelled()
        quiet.append(worker.quiet_s())

    worker, quiet = ThreadWorker(), []
    assert worker.quiet_s() == 0
    worker.submit(job, lambda _: ended.set())
    step.set()
    assert ended.wait(5)
    assert quiet[0] >= 0.2 > quiet[1]
    worker.close()
    assert worker.quiet_s() == 0


def test_nice_worker_lowers_itself_only():
    """Linux has a nice value for each thread; the event loop's must stay."""
    before, found = os.getpriority(os.PRIO_PROCESS, 0), []
    finished = threading.Event()

    def done(result):
        found.append(result)
        finished.set()

    worker = ThreadWorker(nice=LOWEST_PRIORITY)
    worker.submit(lambda _cancelled: os.getpriority(os.PRIO_PROCESS, threading.get_native_id()), done)
    assert finished.wait(5)
    worker.close()
    assert found == [LOWEST_PRIORITY]
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == before
