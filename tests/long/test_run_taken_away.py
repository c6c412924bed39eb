"""As tests/integration/test_run_taken_away.py, for longer."""

import pytest

from shoal.transport.local_broker import find_mosquitto
from tests.integration.taken_away import place

pytestmark = [
    pytest.mark.long,
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
TRIES = 200


@pytest.mark.parametrize("after_another_run", [False, True])
def test_busy_run_is_given_up_many_times(tmp_path, after_another_run):
    """After another run the aggregator answers for that one while this one's file is away."""
    with place(tmp_path) as made:
        if after_another_run:
            made.sign(rounds=2)
        made.stage.start_aggregator()
        made.start_devices()
        if after_another_run:
            made.end_of_run()
        made.sign()
        made.give_up_and_take_up(TRIES)
        assert all(r["contributed"] == 3 for r in made.stage.records(made.run))
