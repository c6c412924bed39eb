"""Resume metadata: the engine's part of a snapshot, which a restarted aggregator needs besides the strategy's state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from aggregator.strategies.base import Event


@dataclass(frozen=True, slots=True)
class RolloverProgress:
    """A rollover under way.

    Attributes:
        generation: roster sequence of the secrets that the next mask epoch is made with.
        tries: attempts that failed.
        folder: the device that folds in this attempt; empty between attempts.
        signing: the second step is open, in which devices sign.
    """

    generation: int
    tries: int
    folder: str
    signing: bool


@dataclass(frozen=True, slots=True)
class ResumeMetadata:
    """The engine's part of a snapshot.

    Attributes:
        epoch: the mask epoch.
        key_id: of its mask, 16 bytes.
        since: the round after which the mask epoch began.
        generation: roster sequence of the secrets in force.
        step: of a rollover, 0 in a round.
        open: a round or a step is open.
        levels: see `aggregator.rounds.screening`.
        news: events since the last round closed.
        rollover: None while there is none.
    """

    epoch: int
    key_id: bytes
    since: int = 0
    generation: int = 0
    step: int = 0
    open: bool = True
    levels: Mapping[str, float] = field(default_factory=dict)
    news: tuple[Event, ...] = ()
    rollover: RolloverProgress | None = None

    @property
    def newest_generation(self) -> int:
        """Roster sequence of the newest secrets that the run has turned to."""
        return self.generation if self.rollover is None else max(self.generation, self.rollover.generation)
