"""Fault injection for the loopback broker: a function decides which copies of a message arrive, and when.

Example: ``lambda passage: (0.0, 0.5)`` duplicates every message; the copy arrives half a second later.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Hop(Enum):
    """The direction of a message: UP to the broker, DOWN from it."""

    UP = "up"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class Passage:
    """A message about to travel one hop: from ``client`` to the broker (UP) or from the broker to ``client`` (DOWN)."""

    hop: Hop
    client: str
    topic: str
    payload: bytes = field(repr=False)


Faults = Callable[[Passage], Sequence[float]]
"""Returns one delay in seconds for each copy of a message that arrives: () loses it, (0.0,) delivers it at once."""
