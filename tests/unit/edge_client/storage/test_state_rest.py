"""The time since the end of the last run, over restarts."""

import math

from edge_client.storage.state import REST_FILE, SAVED_EVERY_S, Rest
from shoal.util.files import write_private


def test_time_while_the_program_runs_counts(tmp_path):
    rest = Rest(tmp_path)
    assert rest.seconds(5.0) == math.inf, "no run has ended yet"
    rest.keep_up(5.0)
    assert not (tmp_path / REST_FILE).exists()
    rest.begin(100.0)
    assert rest.seconds(130.0) == 30.0
    rest.keep_up(100.0 + SAVED_EVERY_S)
    again = Rest(tmp_path)
    assert again.seconds(9e9) == SAVED_EVERY_S, "the clock of another start says nothing"
    again.keep_up(7.0)
    assert again.seconds(17.0) == SAVED_EVERY_S + 10.0


def test_a_crash_loses_what_was_not_saved(tmp_path):
    rest = Rest(tmp_path)
    rest.begin(0.0)
    rest.keep_up(SAVED_EVERY_S - 1)
    assert Rest(tmp_path).seconds(0.0) == 0.0
    rest.keep_up(SAVED_EVERY_S - 1, closing=True)
    assert Rest(tmp_path).seconds(0.0) == SAVED_EVERY_S - 1


def test_a_damaged_file_delays(tmp_path):
    write_private(tmp_path / REST_FILE, b"-1e9")
    assert Rest(tmp_path).seconds(0.0) == 0.0
