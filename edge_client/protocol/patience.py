"""How long a device waits before it reminds the aggregator of its upload."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from shoal import limits

if TYPE_CHECKING:
    from shoal.transport.base import Transport


class RetryTimer:
    """A timer that does not run out while something waits for the broker's acknowledgement.

    Args:
        transport: knows what does. A slow link is still busy with it then, and more would only add to that.
        uniform: draws from [0, 1).
    """

    def __init__(self, transport: Transport, uniform: Callable[[], float]) -> None:
        self._transport = transport
        self._uniform = uniform
        self._due_s: float | None = None

    def set(self, within_s: float, now_s: float) -> None:
        """Run out in half to all of ``within_s`` seconds."""
        self._due_s = now_s + within_s * (0.5 + 0.5 * self._uniform())

    def clear(self) -> None:
        """Never run out."""
        self._due_s = None

    def ran_out(self, now_s: float) -> bool:
        """Return whether the time has come; once."""
        if self._due_s is None or now_s < self._due_s:
            return False
        self._due_s = None
        if self._transport.pending():
            self.set(limits.REMIND_BASE_S, now_s)
            return False
        return True
