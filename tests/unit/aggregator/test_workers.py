"""Threads beside the loop: what they hand back, in which order, how much they hold, and what closed ones do."""

import queue
import threading
from unittest.mock import Mock

import pytest

from aggregator.workers import INTAKE_THREADS, InlineWorkers, RunWorkers, ThreadWorkers, intake_workers

WAIT_S = 10.0


class Driver:
    """A driver's queue, and the list of what was called."""

    def __init__(self, **options):
        self.handed, self.called = queue.SimpleQueue(), []
        self.workers = ThreadWorkers(self.handed.put, "shoal-test", **options)

    def submit(self, name, **options):
        """Submit a job that notes its call, and whose result is noted when it comes back."""
        self.workers.submit(lambda: self.called.append(f"job {name}") or name, self.back, **options)

    def back(self, result):
        self.called.append(f"back {result}")

    def call_back(self):
        """Call the next function that was handed back."""
        self.handed.get(timeout=WAIT_S)()


@pytest.fixture
def made():
    """Return a function that makes a driver; its workers are closed at the end."""
    drivers = []

    def make(**options):
        drivers.append(Driver(**options))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.workers.close()


@pytest.fixture
def driver(made):
    return made()


def fail():
    raise OSError(28, "No space left on device")


def test_jobs_are_done_in_order(driver):
    """Jobs are done in order and called back by the driver."""
    for name in range(3):
        driver.submit(name)
    backs = [driver.handed.get(timeout=WAIT_S) for _ in range(3)]
    assert driver.called == ["job 0", "job 1", "job 2"]
    for back in backs:
        back()
    assert driver.called[3:] == ["back 0", "back 1", "back 2"]


def test_jobs_of_one_key_keep_their_order(made):
    """Jobs of one key keep their order while others overtake them."""
    driver = made(threads=4)
    keys = [f"dev-{number}" for number in range(40)]
    gate = threading.Event()
    driver.workers.submit(lambda: gate.wait(WAIT_S), key=keys[0])
    for turn in range(5):
        for key in keys:
            driver.submit((key, turn), key=key)
    for _ in range(100):  # half of the jobs: those of other threads than that which waits
        driver.call_back()
    assert f"job {(keys[0], 0)}" not in driver.called
    gate.set()
    for _ in range(100):
        driver.call_back()
    for key in keys:
        mine = [entry for entry in driver.called if entry.startswith("back ") and f"'{key}'" in entry]
        assert mine == [f"back {(key, turn)}" for turn in range(5)]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), ValueError("a bug")])
def test_failed_job_is_raised_at_the_call(driver, error):
    """A failed job is raised where the driver calls."""
    driver.workers.submit(Mock(side_effect=error), driver.back)
    driver.submit("next")
    with pytest.raises(type(error)) as caught:
        driver.call_back()
    assert caught.value is error
    driver.call_back()
    assert driver.called == ["job next", "back next"]


def test_untaken_job_hands_nothing_back(driver):
    """A job without a taker hands nothing back."""
    driver.workers.submit(lambda: driver.called.append("job"))
    driver.submit("next")
    driver.call_back()
    assert driver.called == ["job", "job next", "back next"]
    assert driver.handed.empty()


def test_closed_workers_call_nothing(driver):
    """The store that the callback would use is closed by then, and the run is not served any more."""
    driver.submit("early")
    driver.workers.submit(fail, driver.back)
    backs = [driver.handed.get(timeout=WAIT_S) for _ in range(2)]
    driver.submit("late")
    driver.workers.close()
    for back in (*backs, driver.handed.get(timeout=WAIT_S)):
        back()
    assert driver.called == ["job early", "job late"]


def test_submit_waits_until_there_is_room(made):
    """The bytes of jobs that are not finished stay below the limit, however fast jobs are submitted."""
    driver = made(threads=2, most_bytes=100)
    gate = threading.Semaphore(0)
    held, most, lock = 0, 0, threading.Lock()

    def job():
        nonlocal held, most
        with lock:
            held += 40
            most = max(most, held)
        gate.acquire(timeout=WAIT_S)
        with lock:
            held -= 40

    def submit_all():
        for number in range(20):
            driver.workers.submit(job, key=str(number), size=40)

    producer = threading.Thread(target=submit_all)
    producer.start()
    producer.join(0.2)
    assert producer.is_alive()
    assert driver.workers._held_bytes == 80
    for _ in range(20):
        gate.release()
    producer.join(WAIT_S)
    assert not producer.is_alive()
    assert most <= 80


def test_a_job_above_the_limit_runs_alone(made):
    driver = made(most_bytes=100)
    driver.submit("small", size=60)
    driver.submit("huge", size=10_000)
    driver.submit("small", size=60)
    for _ in range(3):
        driver.call_back()
    assert driver.called[-1] == "back small"
    assert "back huge" in driver.called


def test_inline_workers_call_back_at_once():
    """Inline workers run and call back at once."""
    called = []
    workers = InlineWorkers()
    workers.submit(lambda: called.append("job") or 7, called.append, key="x", size=10)
    workers.submit(lambda: called.append("alone"))
    assert called == ["job", 7, "alone"]
    with pytest.raises(OSError, match="No space left"):
        workers.submit(fail, called.append)
    workers.close()


@pytest.mark.parametrize(("cores", "threads"), [(1, 0), (2, 2), (64, INTAKE_THREADS)])
def test_threads_for_uploads_follow_cores(cores, threads):
    before = threading.active_count()
    workers = intake_workers(lambda back: back(), cores)
    assert threading.active_count() - before == threads
    workers.close()


def test_disk_and_numerics_have_threads():
    """A run on one core waits for disk and numerics on other threads."""
    handed = queue.SimpleQueue()
    workers = RunWorkers.threads(handed.put, 1)
    assert isinstance(workers.intake, InlineWorkers)
    driver = threading.get_ident()
    for one in (workers.disk, workers.numerics):
        one.submit(threading.get_ident, lambda thread: thread)
        handed.get(timeout=WAIT_S)
        one.submit(threading.get_ident, handed.put)
        handed.get(timeout=WAIT_S)()
        assert handed.get(timeout=WAIT_S) != driver
    workers.close()
