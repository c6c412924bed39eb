"""Resume metadata: the engine's part of a snapshot, which a restarted aggregator needs besides the strategy's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aggregator.rounds.closing import Watched
from aggregator.strategies.base import Event


@dataclass(frozen=True, slots=True)
class ResumeMetadata:
    """The engine's part of a snapshot.

    Attributes:
        key_version: of the open round.
        watched: see `aggregator.rounds.closing`.
        news: events since the last round closed.
        silent: devices that left rounds unanswered.
    """

    key_version: int
    watched: Watched = field(default_factory=Watched)
    news: tuple[Event, ...] = ()
    silent: Mapping[str, int] = field(default_factory=dict)
