"""The time since the end of the device's last run, by which it refuses a run of a standing order that comes too early.

Only time while the program runs is counted, by the monotonic clock: a wrong clock can delay a run, and never hastens one.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Final

from shoal.util.files import read_if_there, write_atomic

REST_FILE: Final = "rest"
"""Seconds as a decimal number."""
SAVED_EVERY_S: Final = 600.0
"""Interval between two saves; a crash loses the time since the last one."""


class Rest:
    """Counts the seconds since the end of the last run; infinitely many before the end of the first.

    Args:
        directory: the device's.
    """

    def __init__(self, directory: Path) -> None:
        self._path = directory / REST_FILE
        data = read_if_there(self._path)
        # A damaged file says nothing: the device has just ended a run, as far as it knows.
        self._before_s = math.inf if data is None else float(data) if data.isdigit() else 0.0
        self._saved_s = self._before_s
        self._since_s = math.nan

    def seconds(self, now_s: float) -> float:
        """Return the seconds counted; ``now_s`` is monotonic."""
        return self._before_s + (0.0 if math.isnan(self._since_s) else now_s - self._since_s)

    def begin(self, now_s: float) -> None:
        """Start anew, durably: a run has ended."""
        self._before_s, self._since_s = 0.0, now_s
        self._save(0.0, durable=True)

    def keep_up(self, now_s: float, *, closing: bool = False) -> None:
        """Count on from the first call, and save now and then, or at once when the program is ``closing``."""
        if math.isnan(self._since_s):
            self._since_s = now_s
        seconds = self.seconds(now_s)
        if seconds < math.inf and (closing or seconds - self._saved_s >= SAVED_EVERY_S):
            self._save(seconds, durable=False)

    def _save(self, seconds: float, *, durable: bool) -> None:
        write_atomic(self._path, str(int(seconds)).encode(), durable=durable)
        self._saved_s = seconds
