"""Watch the rounds of all runs that are simulated within a block.

Thirty experiments start runs in their own ways; a report about them needs no parameter in each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from aggregator.strategies.base import ClientUpdate, Outcome, RoundPlan
from shoal.simulation.engine.records import SimRound
from shoal.simulation.engine.workforce import Workforce


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """A closed round in full, for experiments that measure more."""

    round: int
    plan: RoundPlan
    contributions: tuple[ClientUpdate, ...]
    outcome: Outcome
    state: Any
    workforce: Workforce


RoundWatch = Callable[[Observation, SimRound | None], None]
"""Receives a closed round in full, and in figures; None for a round that does not count."""

_WATCH: ContextVar[RoundWatch | None] = ContextVar("watch", default=None)


@contextmanager
def watched_by(watch: RoundWatch) -> Iterator[None]:
    """Call ``watch`` after each round of the runs that are simulated inside the block, in this thread."""
    token = _WATCH.set(watch)
    try:
        yield
    finally:
        _WATCH.reset(token)


def current_watch() -> RoundWatch | None:
    """Return the watch of the innermost block; None outside."""
    return _WATCH.get()
