"""Fault injection on the loopback broker: a function decides which copies of a message arrive, and when."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum


class Hop(Enum):
    """Which half of the way a message is on."""

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
"""Decides a message's fate: one delay in seconds for each copy that arrives; empty loses it, (0.0,) is a clean passage."""
