"""FedGroup's settings and state, and its change to a new mask epoch.

At a rollover each group gets an origin of its own, and so do w_0, from which newcomers pre-train, and the auxiliary global
model. The auxiliary model stays the mean of the groups' models: its origin is the mean of the groups' new origins, and its
offset is the mean of their offsets since then. Inter-group aggregation needs models that share an origin, so it ends.
Directions are masked under the new key; unless all of them are, newcomers take the group of least loss.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from aggregator.strategies.base import ClusterModel, Event, Gathered, require, starts_of
from aggregator.strategies.renewal import (
    Carried,
    Inherited,
    Renewal,
    fresh_slot,
    renewed_rows,
)
from aggregator.strategies.settings import StrategySettings
from shoal import limits
from shoal.protocol.documents import Capabilities
from shoal.types import Float32Vector


@dataclass(frozen=True, slots=True)
class FedGroupSettings(StrategySettings):
    """FedGroup's own parameters.

    Attributes:
        groups: m.
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

    groups: int = 3
    alpha: int = 20
    measure: str = "edc"
    start: str = "mean"
    rcc: bool = False
    rac: bool = False
    eta_g: float = 0.0
    discrepancy: bool = True

    @property
    def capabilities(self) -> Capabilities:
        """Cold starts pre-train, ``eta_g`` adds up models, and directions outlive a mask epoch; RAC has none."""
        return Capabilities(pretrain=True, scale=self.eta_g > 0, carry=not self.rac)

    def check(self) -> None:
        """Raise ConfigError for values that make no sense."""
        require(1 <= self.groups <= limits.MAX_MODELS - 2, f"groups is from 1 to {limits.MAX_MODELS - 2}")
        require(self.alpha >= 1, "alpha is at least 1")
        require(self.measure in ("edc", "madc"), f"measure {self.measure!r} is neither edc nor madc")
        require(0 <= self.eta_g <= 1, f"eta_g {self.eta_g:g} is not between 0 and 1")
        require(self.start in ("mean", "origin"), f"start {self.start!r} is neither mean nor origin")


@dataclass(frozen=True, slots=True)
class FedGroupState:
    """The groups, once the cold start has made them.

    Attributes:
        slots: the groups' models; directions: their Delta w_0, (d,) float32, with which newcomers are compared, none
            after a rollover that lost them; behind: number of devices whose updates are averaged in each.
        origin: w_0; common: the model from which the auxiliary one is as far as the groups' are on average from theirs.
        apart: a rollover has given each group an origin of its own, so that there is no inter-group aggregation.
        since: round of the group cold start, 0 before.
        clusters: group of every device that has one.
        cohort: devices drawn for the round that waits for its newcomers' cold start; empty where none waits.
        lengths: with eta_g, the last known l2 norm of each group's model; 0 where unknown.
        news: events of a rollover, for the next round's outcome.
    """

    slots: tuple[ClusterModel, ...] = ()
    directions: tuple[Float32Vector, ...] = ()
    behind: tuple[int, ...] = ()
    origin: ClusterModel = field(default_factory=ClusterModel)
    common: ClusterModel = field(default_factory=ClusterModel)
    apart: bool = False
    since: int = 0
    clusters: Mapping[str, int] = field(default_factory=dict)
    cohort: tuple[str, ...] = ()
    lengths: tuple[float, ...] = ()
    news: tuple[Event, ...] = ()
    gathered: Gathered = field(default_factory=dict)

    @property
    def auxiliary(self) -> ClusterModel:
        """The auxiliary global model: the mean of the groups' models (fedgroup Alg. 2), the origin while there are none."""
        if not self.slots:
            return self.origin
        count = len(self.slots)
        moved = [s for s in self.slots if s.offset is not None]
        common, scale = self.common, sum(s.scale for s in self.slots) / count
        if not self.apart:
            (first, total_scale), *others = starts_of((1.0, s) for s in self.slots).items()
            common = ClusterModel(first, others=tuple((weight / count, number) for number, weight in others))
            scale = total_scale / count
        if not moved:
            return dataclasses.replace(common, scale=scale)
        total = np.zeros_like(moved[0].offset)
        for slot in moved:
            total += slot.offset
        total /= np.float32(len(self.slots))
        fewest, newest = min(s.contributors for s in moved), max(s.version for s in moved)
        return dataclasses.replace(common, offset=total, contributors=fewest, version=newest, scale=scale)


def inherited(state: FedGroupState, groups: int, *, directions: bool) -> Inherited:
    """Return the groups' models by their numbers, the auxiliary model as ``groups``, w_0 as the number after it.

    Before the group cold start there is only w_0.

    Args:
        state: between rounds.
        groups: m.
        directions: whether newcomers are compared with directions.
    """
    if not state.since:
        return Inherited({groups + 1: state.origin})
    rows = zip(state.directions, state.behind, strict=True) if directions else ()
    models = {**dict(enumerate(state.slots)), groups: state.auxiliary, groups + 1: state.origin}
    return Inherited(models, carried={_direction(j): Carried(row, count) for j, (row, count) in enumerate(rows)})


def renewed(state: FedGroupState, renewal: Renewal, groups: int, *, directions: bool, adds: bool) -> FedGroupState:
    """Return the state in the next mask epoch.

    Args:
        state: as `inherited` took it.
        renewal: the result of the rollover.
        groups: m.
        directions: as in `inherited`.
        adds: whether inter-group aggregation was asked for.
    """
    origin = fresh_slot(renewal, groups + 1)
    if not state.since:
        return FedGroupState(origin=origin, common=origin, news=state.news)
    rows = renewed_rows(renewal, [_direction(j) for j in range(len(state.directions))]) if directions else ()
    news = list(state.news)
    if directions and state.directions and not rows:
        news.append(Event(renewal.round, "directions-lost", {}))
    if adds and not state.apart:
        news.append(Event(renewal.round, "intergroup-ended", {}))
    return dataclasses.replace(
        state,
        slots=tuple(fresh_slot(renewal, j) for j in range(len(state.slots))),
        directions=rows,
        behind=state.behind if rows else (),
        origin=origin,
        common=fresh_slot(renewal, groups),
        apart=True,
        lengths=(0.0,) * len(state.slots),
        news=tuple(news),
        gathered={},
    )


def _direction(group: int) -> str:
    return f"direction-{group}"
