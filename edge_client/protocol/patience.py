"""The timer for reminders of an upload."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal import limits

if TYPE_CHECKING:
    from shoal.transport.base import Transport


class RetryTimer:
    """A timer with jitter that is held back while publishes are unacknowledged.

    Args:
        transport: its `pending` counts unacknowledged publishes. While there are any, a slow link is still busy, and a
            reminder would only add to its load.
        uniform: draws from [0, 1).
    """

    def __init__(self, transport: Transport, uniform: Callable[[], float]) -> None:
        self._transport = transport
        self._uniform = uniform
        self._due_s: float | None = None

    def set(self, within_s: float, now_s: float) -> None:
        """Expire after a random time between half of ``within_s`` seconds and all of it."""
        self._due_s = now_s + within_s * (0.5 + 0.5 * self._uniform())

    def clear(self) -> None:
        """Stop the timer."""
        self._due_s = None

    def ran_out(self, now_s: float) -> bool:
        """Return True once when the timer has expired; restart it instead while publishes are unacknowledged."""
        if self._due_s is None or now_s < self._due_s:
            return False
        self._due_s = None
        if self._transport.pending():
            self.set(limits.REMIND_BASE_S, now_s)
            return False
        return True
