"""The owner's order for a run, and the orders that may follow each other.

    GO          rounds open as usual; every run begins with it
    PAUSE       the open round goes on to its close, and no other opens
    STOP        the same, and then the final round opens, or the run ends if no round has opened yet
    STOP_NOW    as STOP, and the open round closes at once with the uploads that are durable

A final round that is open goes on under every order: its figures and checkpoints are the result of the run.

Example: a run in round 4 gets PAUSE. Round 4 closes with its quorum, and round 5 opens once the owner has resumed the run with
GO. STOP instead makes the final round follow. No order follows STOP but STOP_NOW.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType
from typing import Final

from shoal.protocol.messages import ORDER_WORDS, RunOrder


class Order(Enum):
    """An order of the owner; the value is its name in files and in `status`."""

    GO = "go"
    PAUSE = "pause"
    STOP = "stop"
    STOP_NOW = "stop_now"

    @property
    def stops(self) -> bool:
        """Whether the run ends before its last round."""
        return self in (Order.STOP, Order.STOP_NOW)


WORDS: Final[Mapping[Order, str]] = MappingProxyType(
    {
        Order.GO: ORDER_WORDS[RunOrder.NONE],
        Order.PAUSE: ORDER_WORDS[RunOrder.PAUSED],
        Order.STOP: ORDER_WORDS[RunOrder.STOPPED],
        Order.STOP_NOW: ORDER_WORDS[RunOrder.STOPPED],
    }
)
"""The words of each order in `status`, log and records; empty for a run that goes on."""


def may_follow(before: Order, after: Order) -> bool:
    """Return whether ``after`` may replace ``before``; the same order again may always."""
    return after is before or not before.stops or after is Order.STOP_NOW


def newest(before: Order, after: Order) -> Order:
    """Return the order in force once ``after`` has come: STOP after STOP_NOW changes nothing."""
    return after if may_follow(before, after) else before
