"""The thread that waits for the disk: what it hands back, in which order, and what a closed one does."""

import queue

import pytest

from aggregator.storage.fsync_worker import ThreadSyncer


@pytest.fixture
def scene():
    """Return (syncer, queue of what it hands back, list of what was called)."""
    handed = queue.SimpleQueue()
    return ThreadSyncer(handed.put), handed, []


def test_jobs_are_done_in_order_and_called_back_by_the_driver(scene):
    syncer, handed, called = scene
    for i in range(3):
        syncer.submit(lambda i=i: called.append(f"job {i}"), lambda i=i: called.append(f"done {i}"))
    backs = [handed.get(timeout=10) for _ in range(3)]
    assert called == ["job 0", "job 1", "job 2"]
    for back in backs:
        back()
    assert called[3:] == ["done 0", "done 1", "done 2"]
    syncer.close()


def test_a_failed_job_is_raised_where_the_driver_calls(scene):
    syncer, handed, called = scene

    def fail():
        raise OSError(28, "No space left on device")

    syncer.submit(fail, lambda: called.append("done"))
    with pytest.raises(OSError, match="No space left"):
        handed.get(timeout=10)()
    assert not called
    syncer.close()


def test_what_was_handed_back_and_not_called_does_nothing_once_the_syncer_is_closed(scene):
    """The store that the callback would use is closed by then, and the run is not served any more."""
    syncer, handed, called = scene

    def fail():
        raise OSError(5, "Input/output error")

    syncer.submit(lambda: called.append("job"), lambda: called.append("done"))
    syncer.submit(fail, lambda: called.append("done"))
    backs = [handed.get(timeout=10) for _ in range(2)]
    syncer.submit(lambda: called.append("late job"), lambda: called.append("late"))
    syncer.close()
    for back in (*backs, handed.get(timeout=10)):
        back()
    assert called == ["job", "late job"]
