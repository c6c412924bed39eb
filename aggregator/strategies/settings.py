"""Base class of every algorithm's settings, and the facts about a run that follow from them.

The owner derives parts of the run plan from these facts, and the simulator chooses how to sum updates by them. Neither asks
for an algorithm by its name, so a new algorithm overrides here the facts that differ from the defaults.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final, Literal

from shoal.protocol.documents import Capabilities

Reads = Literal["updates", "norms", "means"]
AUTO: Final = 0
AUTO_TEXT: Final = "auto"
"""A setting for the number of clusters, as a number and as the owner writes it, that leaves the number to the strategy."""


@dataclass(frozen=True, slots=True)
class StrategySettings:
    """Settings of one algorithm. A subclass adds a field with a default for each setting.

    Attributes:
        clusters_setting: name of the setting that fixes the number of clusters; empty if none does. If its default is `AUTO`, the
            strategy finds the number itself.
        splits: whether a cluster may be split in two, each half of at least ``min_contributors`` devices.
    """

    clusters_setting: ClassVar[str] = ""
    splits: ClassVar[bool] = False

    @property
    def clusters(self) -> int:
        """The number of clusters that the settings fix; 1 if they fix none."""
        return max(1, int(getattr(self, self.clusters_setting))) if self.clusters_setting else 1

    @property
    def reads(self) -> Reads:
        """The part of single updates that the strategy reads: all (``updates``), their ``norms``, or only their ``means``.

        The simulator sums updates as they arise unless the strategy reads ``updates``.
        """
        return "updates"

    def compared(self, _drawn: int, _fleet: int, /) -> int:
        """Return the most updates whose products with each other a round needs at a time; 0 if it needs none.

        Searches for groups compare a sample of bounded size, and robust means compare blocks; both are not counted.

        Args:
            _drawn: devices that train in a round, by the run's participation.
            _fleet: all devices.
        """
        return 0

    @property
    def capabilities(self) -> Capabilities:
        """Capabilities that devices must allow besides training, scoring and evaluating; none by default."""
        return Capabilities()

    @property
    def uses_validation(self) -> bool:
        """Whether devices score models on their validation share, which they all need then."""
        return False

    @property
    def origins(self) -> int:
        """Number of starting models that the owner seals and ships."""
        return 1

    @property
    def discarded_rounds(self) -> int:
        """Training rounds whose results are thrown away, such as those of random starts that are not chosen."""
        return 0
