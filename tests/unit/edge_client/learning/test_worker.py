"""The worker's thread: one job at a time, and nothing of a job once it is done."""

import gc
import threading
import weakref

import pytest

from edge_client.learning.worker import InlineWorker, ThreadWorker


class Mask:
    """Stands for what a job holds: models, and the mask of an epoch."""


def submitted(worker, mask, done):
    worker.submit(lambda _cancelled: mask, lambda result: done(result is mask))


@pytest.mark.parametrize("kind", [ThreadWorker, InlineWorker])
def test_a_job_that_is_done_is_let_go(kind):
    """A device may wait for its next order for days: the mask of an epoch that is over must not wait with it."""
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
