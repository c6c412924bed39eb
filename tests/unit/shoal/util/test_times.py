"""Formatting of times, including those out of the calendar's range."""

import pytest

from shoal.util.console import day, second, span


@pytest.mark.parametrize("at_s", [2**40, 2**63, 2**64 - 1])
def test_any_possible_time_is_written(at_s):
    """Any time that a message can hold is written."""
    assert second(at_s)


def test_times_are_in_iso_8601():
    assert second(10**9) == "2001-09-09T01:46:40Z"
    assert day(10**9) == "2001-09-09"


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min"), (3600, "1 h"), (7500, "2 h 5 min"), (90000, "1 d 1 h")],
)
def test_a_span_has_its_two_largest_units(seconds, text):
    assert span(seconds) == text
