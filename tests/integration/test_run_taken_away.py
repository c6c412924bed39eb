"""A run is given up by taking its file away while devices upload, and resumed when the file is put back."""

import signal
import time

import pytest

from shoal.transport.local_broker import find_mosquitto
from tests.integration.taken_away import place

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
TRIES = 3


@pytest.mark.long
def test_a_busy_run_is_given_up_and_taken_up(tmp_path):
    """The aggregator resumes each time, and every round gets its three uploads."""
    with place(tmp_path) as made:
        made.sign()
        made.stage.start_aggregator()
        made.start_devices()
        made.give_up_and_take_up(TRIES)
        assert all(r["contributed"] == 3 for r in made.stage.records(made.run))


@pytest.mark.parametrize("end", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.long)])
def test_restarted_aggregator_takes_a_run_up(tmp_path, end):
    """An earlier run is over. The aggregator answers for that one while the file is away, and sees this one's uploads."""
    with place(tmp_path) as made:
        made.sign(rounds=2)
        made.stage.start_aggregator()
        made.start_devices()
        made.end_of_run()
        made.sign()
        made.goes_on()
        for _ in range(2):
            made.take_away()
            time.sleep(1.0)  # for uploads that were on their way
            made.stage.stop("aggregator", end)
            made.stage.start_aggregator()
            made.put_back()
            made.goes_on()
        assert all(r["contributed"] == 3 for r in made.stage.records(made.run))
