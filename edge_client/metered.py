"""Metered hours: a time of day in which the device takes part in no training round, since its link costs money by the byte.

It still sends its presence and its declines, a few hundred bytes a round, and takes part in the final round.

Example:
    >>> hours = parse_hours("22:00-06:30")
    >>> hours.contains(23 * 60), hours.contains(6 * 60 + 30), str(hours)
    (True, False, '22:00-06:30')
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from typing import Final

from shoal.errors import ConfigError

_TIME: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class Hours:
    """A time of day, in minutes since midnight by the device's own clock and time zone; it may go over midnight."""

    start_min: int
    end_min: int

    def contains(self, minute: int) -> bool:
        """Return whether a minute of the day is in these hours; their last minute is the one before ``end_min``."""
        if self.start_min <= self.end_min:
            return self.start_min <= minute < self.end_min
        return minute >= self.start_min or minute < self.end_min

    def now(self, unix_s: float) -> bool:
        """Return whether a time is in these hours, by the device's time zone."""
        local = time.localtime(unix_s)
        return self.contains(60 * local.tm_hour + local.tm_min)

    def __str__(self) -> str:
        (a, b), (c, d) = divmod(self.start_min, 60), divmod(self.end_min, 60)
        return f"{a:02}:{b:02}-{c:02}:{d:02}"


def parse_hours(text: str) -> Hours | None:
    """Return the hours of a text such as ``08:00-20:00``; None for an empty one.

    Raises:
        ConfigError: it names no two different times.
    """
    if not text:
        return None
    found = _TIME.fullmatch(text)
    hours = None if found is None else Hours(60 * int(found[1]) + int(found[2]), 60 * int(found[3]) + int(found[4]))
    if hours is None or hours.start_min == hours.end_min:
        raise ConfigError(
            f"metered is two different times of day, not {text[:40]!r}",
            hint="such as 08:00-20:00, or 22:00-06:00 over midnight; leave it out for a link that is never metered",
        )
    return hours
