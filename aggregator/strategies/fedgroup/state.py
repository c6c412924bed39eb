"""FedGroup's settings and state."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

from aggregator.numerics.parted import plain_mean_of
from aggregator.strategies.base import AUTO, ClusterModel, StrategySettings, require, starts_of
from aggregator.strategies.grouping.search import MOST_FOUND, SearchState
from shoal import limits
from shoal.protocol.documents import Capabilities

MOST_GROUPS: Final = limits.MAX_MODELS // 2 - 1
"""A group has two models, its own and that of its direction; the auxiliary model and the origin come on top."""


@dataclass(frozen=True, slots=True)
class FedGroupSettings(StrategySettings):
    """FedGroup's own parameters.

    Attributes:
        groups: m; ``auto`` finds it (`aggregator.strategies.grouping`) and uses neither ``alpha`` nor ``measure``.
        alpha: the group cold start takes alpha * m devices, or all where there are fewer.
        measure: ``edc`` (Eq. 8) or ``madc`` (Eq. 7).
        start: first model of a group: the ``mean`` of its devices' pre-trained models (Alg. 3, line 16), or the
            ``origin`` (Alg. 2, line 2).
        rcc: ablation: the groups' directions are those of m cold devices drawn at random, no clustering.
        rac: ablation: devices that were not in the cold start come to a group at random.
        eta_g: inter-group learning rate (Alg. 2, line 18); 0 is off. Devices then report the length of their models.
        discrepancy: report Eq. 4 in every round.
    """

    clusters_setting: ClassVar[str] = "groups"
    looks: ClassVar[bool] = True
    most_kept: ClassVar[int] = MOST_FOUND

    groups: int = AUTO
    alpha: int = 20
    measure: str = "edc"
    start: str = "mean"
    rcc: bool = False
    rac: bool = False
    eta_g: float = 0.0
    discrepancy: bool = True

    def compared(self, _drawn: int, fleet: int, /) -> int:
        """The updates of the group cold start, if ``groups`` is given and ``rcc`` is off."""
        return 0 if self.groups == AUTO or self.rcc else min(self.alpha * self.groups, fleet)

    @property
    def capabilities(self) -> Capabilities:
        """Cold starts pre-train, newcomers compare directions, and ``eta_g`` adds up models."""
        return Capabilities(pretrain=True, scale=self.eta_g > 0, compare=not self.rac)

    @property
    def most_groups(self) -> int:
        """The number of groups, or the most that are found."""
        return self.groups or MOST_FOUND

    @property
    def sums_suffice(self) -> bool:
        """With a number of groups; single updates as centres, and models that are added up, need more."""
        return self.groups != AUTO and not self.rcc and not self.eta_g

    def check(self) -> None:
        """Raise ConfigError for values that make no sense."""
        require(0 <= self.groups <= MOST_GROUPS, f"groups is from 1 to {MOST_GROUPS}, or auto")
        require(not self.rcc or self.groups != AUTO, "rcc draws a given number of centres", "give groups=N")
        require(self.alpha >= 1, "alpha is at least 1")
        require(self.measure in ("edc", "madc"), f"measure {self.measure!r} is neither edc nor madc")
        require(0 <= self.eta_g <= 1, f"eta_g {self.eta_g:g} is not between 0 and 1")
        require(self.start in ("mean", "origin"), f"start {self.start!r} is neither mean nor origin")


@dataclass(frozen=True, slots=True)
class FedGroupState:
    """The groups, once the cold start has made them.

    Attributes:
        slots: the groups' models; none before the group cold start.
        origin: w_0.
        directions: for each group w_0 plus its direction, the mean of its devices' pre-training updates; none if newcomers don't
            compare with them.
        clusters: group of every device that has one.
        cohort: the devices that train next, once those among them that had no group have been placed.
        tried: devices that did not answer when they were to be placed; they choose by loss.
        lengths: with eta_g, the last known l2 norm of each group's model; 0 where unknown.
        asked: group -> the last round in which it had its turn, where groups take turns (`drawing.drawn_in_turn`).
        devices: the fleet's when the run began.
        search: the search for groups while ``groups`` is ``auto`` and none are found.
    """

    slots: tuple[ClusterModel, ...] = ()
    origin: ClusterModel = field(default_factory=ClusterModel)
    directions: tuple[ClusterModel, ...] = ()
    clusters: Mapping[str, int] = field(default_factory=dict)
    cohort: tuple[str, ...] = ()
    tried: tuple[str, ...] = ()
    lengths: tuple[float, ...] = ()
    asked: Mapping[int, int] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    search: SearchState | None = None

    @property
    def auxiliary(self) -> ClusterModel:
        """The auxiliary global model: the mean of the groups' models (fedgroup Alg. 2), the origin while there are none."""
        if not self.slots:
            return self.origin
        count = len(self.slots)
        moved = [s for s in self.slots if s.offset is not None]
        (first, weight), *others = starts_of((1.0, s) for s in self.slots).items()
        mean = ClusterModel(first, scale=weight / count, others=tuple((w / count, number) for number, w in others))
        if not moved:
            return mean
        total = plain_mean_of([s.offset for s in moved], len(self.slots))
        fewest, newest = min(s.contributors for s in moved), max(s.version for s in moved)
        return dataclasses.replace(mean, offset=total, contributors=fewest, version=newest)
