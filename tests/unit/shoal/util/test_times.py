"""Formatting of times, including those out of the calendar's range."""

import pytest

from shoal.util.times import utc


@pytest.mark.parametrize("at_s", [2**40, 2**63, 2**64 - 1])
def test_any_time_that_a_message_can_hold_is_written(at_s):
    assert utc(at_s)


def test_a_time_is_written_to_the_minute():
    assert utc(10**9) == "2001-09-09 01:46 UTC"
