"""Metered hours of a device."""

from __future__ import annotations

import time

import pytest

from edge_client.config import Hours, parse_hours
from shoal.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "inside", "outside"),
    [
        ("08:00-20:00", ("08:00", "19:59"), ("07:59", "20:00", "00:00")),
        ("22:00-06:30", ("22:00", "23:59", "00:00", "06:29"), ("06:30", "21:59")),
        ("00:00-23:59", ("00:00", "12:00"), ("23:59",)),
    ],
)
def test_hours_hold_their_first_minute(text, inside, outside):
    """Hours hold their first minute and not their last."""
    hours = parse_hours(text)
    assert str(hours) == text

    def minute(at):
        return 60 * int(at[:2]) + int(at[3:])

    assert all(hours.contains(minute(at)) for at in inside)
    assert not any(hours.contains(minute(at)) for at in outside)


def test_no_text_means_no_hours():
    assert parse_hours("") is None


@pytest.mark.parametrize(
    "text", ["8:00-20:00", "24:00-01:00", "08:60-09:00", "08:00", "08:00-08:00", "day", "08:00-20:00 "]
)
def test_other_texts_show_an_example(text):
    """Other texts are refused with an example."""
    with pytest.raises(ConfigError, match="metered is two different times of day") as error:
        parse_hours(text)
    assert "08:00-20:00" in error.value.hint


def test_time_is_that_of_the_devices_zone(monkeypatch):
    monkeypatch.setenv("TZ", "UTC-2")
    time.tzset()
    try:
        noon_utc = 12 * 3600.0
        assert Hours(14 * 60, 15 * 60).now(noon_utc)
        assert not Hours(12 * 60, 13 * 60).now(noon_utc)
    finally:
        monkeypatch.undo()
        time.tzset()
