"""The worker's thread: it runs one job at a time, and holds no reference to a finished job."""

import gc
import threading
import weakref

import pytest

from edge_client.learning.worker import InlineWorker, ThreadWorker


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
