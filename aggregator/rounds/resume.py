"""Resume metadata: the engine's part of a snapshot, which a restarted aggregator needs besides the strategy's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aggregator.rounds.standstill import Standstill
from aggregator.strategies.base import Event
from aggregator.strategies.robust import Standings


@dataclass(frozen=True, slots=True)
class ResumeMetadata:
    """The engine's part of a snapshot.

    Attributes:
        key_version: of the open round.
        levels: see `aggregator.rounds.screening`.
        news: events since the last round closed.
        standstill: clusters whose model stands still.
        apart: see `aggregator.rounds.standing_apart`.
        silent: devices that left rounds unanswered.
    """

    key_version: int
    levels: Mapping[str, float] = field(default_factory=dict)
    news: tuple[Event, ...] = ()
    standstill: Standstill = field(default_factory=Standstill)
    apart: Standings = field(default_factory=Standings)
    silent: Mapping[str, int] = field(default_factory=dict)
