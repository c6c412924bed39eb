"""One-shot clustering: Ghosh et al. (extended), section 4.1, Alg. 1.

Line 1: every device trains alone to convergence and sends its model (round 1, by the plan's ``pretrain`` recipe).
Line 2: k-means of the models, here of their deltas from the one origin, which have the same distances, by their Gram
matrix. Line 3: FedAvg inside each cluster, by the plan's ``local`` recipe, for the rounds that follow.

The paper does not say from which model the clusters start: here from the mean of their members' models (default) or from
the origin. A device that missed line 1 scores the clusters' models, trains the best and joins that cluster: its own model
can't be compared with the others', which were masked under another key. If fewer than k devices, or fewer than two, uploaded
in the first round, line 1 is repeated.

Beyond the paper: ``k = auto`` finds the number of clusters (aggregator.strategies.grouping). A cluster of fewer than
``min_contributors`` devices joins the one of the nearest direction. Where a mean needs more than one device, clusters take turns
under partial participation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.backend import cosine_from_gram, gram
from aggregator.numerics.clustering import kmeans_from_gram
from aggregator.numerics.silhouette import join_small
from aggregator.strategies.base import (
    AUTO,
    ClientUpdate,
    ClusterModel,
    Common,
    Event,
    Groups,
    Outcome,
    RoundPlan,
    StrategySettings,
    advanced,
    capped_devices,
    evaluates,
    final_assignment,
    parse_settings,
    require,
    require_one_segment,
    retained,
    train_assignment,
)
from aggregator.strategies.drawing import drawn_in_turn
from aggregator.strategies.grouping.search import MOST_FOUND, Search, SearchState, retained_search
from shoal import limits
from shoal.protocol.cells import Partition
from shoal.protocol.documents import Capabilities, RunPlan
from shoal.protocol.messages import Phase


@dataclass(frozen=True, slots=True)
class OneShotSettings(StrategySettings):
    """One-shot clustering's own parameters.

    Attributes:
        k: clusters; ``auto`` finds the number.
        start: first model of a cluster: ``mean`` of its members' models, or ``origin``.
    """

    clusters_setting: ClassVar[str] = "k"
    looks: ClassVar[bool] = True
    most_kept: ClassVar[int] = MOST_FOUND

    k: int = AUTO
    start: str = "mean"

    def compared(self, _drawn: int, fleet: int, /) -> int:
        """All devices' models at once, whatever the participation, if ``k`` is given."""
        return fleet if self.k != AUTO else 0

    @property
    def sums_suffice(self) -> bool:
        """With a number of clusters."""
        return self.k != AUTO

    @property
    def capabilities(self) -> Capabilities:
        """Local convergence has a recipe of its own."""
        return Capabilities(pretrain=True)

    @property
    def most_clusters(self) -> int:
        """The number of clusters, or the most that are found."""
        return self.k or MOST_FOUND


@dataclass(frozen=True, slots=True, kw_only=True)
class OneShotState:
    """The clusters, once they are found.

    Attributes:
        slots: one a cluster.
        origin: the origin from which devices train alone.
        clusters: cluster of every device that has one.
        asked: cluster -> the last round in which it had its turn, where clusters take turns (`drawing.drawn_in_turn`).
        devices: the fleet's when the run began.
        search: the search for clusters while ``k`` is ``auto`` and none are found.
    """

    slots: tuple[ClusterModel, ...] = ()
    origin: ClusterModel = field(default_factory=ClusterModel)
    clusters: Mapping[str, int] = field(default_factory=dict)
    asked: Mapping[int, int] = field(default_factory=dict)
    devices: tuple[str, ...] = ()
    search: SearchState | None = None


def clustered(products: NDArray[np.float64], k: int, run: RunPlan) -> NDArray[np.intp]:
    """Return the cluster of each model by the dot products of their deltas, (n, n) float64: line 2."""
    labels = kmeans_from_gram(products, k, run.seed)
    if run.recipe.min_contributors > 1:
        labels = join_small(cosine_from_gram(products), labels, run.recipe.min_contributors)
    return labels


class OneShot(Common):
    """One-shot clustering on masked offsets."""

    name = "one-shot"
    settings_type = OneShotSettings
    settings: OneShotSettings
    state_type = OneShotState

    def prepare(self) -> None:
        """Check the run and its settings, and make what follows from them."""
        require(0 <= self.settings.k < limits.MAX_MODELS, f"k is from 1 to {limits.MAX_MODELS - 1}, or auto")
        require(self.settings.start in ("mean", "origin"), f"start {self.settings.start!r} is neither mean nor origin")
        require(
            self.run.recipe.rounds > 1, "one-shot clustering takes a round of its own before the first one of training"
        )
        require_one_segment(self.run)
        self.untrained = self.settings.most_clusters
        weighting = self.run.recipe.weighting
        self.search = Search(self.run, self.backend, self.average, weighting=weighting, first_id=self.untrained + 1)

    @staticmethod
    def models(run: RunPlan) -> int:
        """Most models a run names at a time: the clusters', and the origin after them."""
        settings: OneShotSettings = parse_settings(OneShotSettings, run)
        return settings.most_clusters + 1 + (Search.models() if settings.k == AUTO else 0)

    @staticmethod
    def partitions(run: RunPlan, gram: NDArray[np.float64]) -> tuple[Partition, ...]:
        """Return the clusters by the products of the models' deltas, (n, n) float64."""
        settings: OneShotSettings = parse_settings(OneShotSettings, run)
        return (Partition(bytes(clustered(gram, settings.k, run).tolist())),)

    def init(self, devices: tuple[str, ...]) -> OneShotState:
        """Return the state before round 1, with the clusters of an earlier run if it begins with those."""
        if self.run.origins > 1:
            slots = tuple(ClusterModel(origin) for origin in range(self.run.origins))
            return OneShotState(slots=slots, devices=devices)
        return OneShotState(devices=devices, search=SearchState() if self.settings.k == AUTO else None)

    def plan(self, state: OneShotState, round_: int, available: tuple[str, ...]) -> tuple[OneShotState, RoundPlan]:
        """Devices without a cluster train, whether drawn or not; of the others, those drawn train their cluster's model.

        Before the clusters are found they train alone, afterwards the cluster's model of least loss.
        """
        if state.search is not None:
            return state, self.search.plan(state.search, round_, available)
        placed = tuple(d for d in available if d in state.clusters)
        evaluate = evaluates(self.run, round_)
        first = train_assignment((self.untrained,), evaluate=evaluate, phase=Phase.PRETRAIN)
        if state.slots:
            first = train_assignment(tuple(range(len(state.slots))), evaluate=evaluate)
        assignments = {d: first for d in available if d not in state.clusters}
        if placed:
            chosen, asked = drawn_in_turn(self.run, round_, placed, state.clusters, state.asked)
            state = dataclasses.replace(state, asked=asked)
            assignments |= {d: train_assignment((state.clusters[d],), evaluate=evaluate) for d in chosen}
        models = dict(enumerate(state.slots)) | {self.untrained: state.origin}
        used = {j for o in assignments.values() for j in o.candidates}
        return state, RoundPlan(round_, {j: s for j, s in models.items() if j in used}, assignments)

    def close(self, state: OneShotState, plan: RoundPlan, given: list[ClientUpdate]) -> tuple[OneShotState, Outcome]:
        """Line 2 in the round that has the models; line 3 in those that follow, and latecomers join the cluster they chose."""
        models = [c for c in given if c.phase is Phase.PRETRAIN]
        capped: dict[str, float] = {}
        looked = self.look(models) if self.look is not None and models and not state.slots else None
        models = models if looked is None else looked.known(models)
        if state.search is not None:
            return self.search.settle(
                state, given, plan, lambda s, found: dataclasses.replace(s, slots=found.groups, clusters=found.clusters)
            )
        if state.slots:
            by_cluster = [
                [c for c in given if c.phase is Phase.TRAIN and c.model == j] for j in range(len(state.slots))
            ]
            slots = tuple(
                advanced(s, mine, self.run, self.average, plan.round)
                for s, mine in zip(state.slots, by_cluster, strict=True)
            )
            capped = self._capped(
                m for m, old, new in zip(by_cluster, state.slots, slots, strict=True) if new is not old
            )
            late = {c.device: c.model for c in given if c.device not in state.clusters}
            state = dataclasses.replace(state, slots=slots, clusters={**state.clusters, **late})
            events = tuple(
                Event(plan.round, "newcomer", {"device": d, "cluster": j, "by": "loss"}) for d, j in late.items()
            )
        elif len(models) < max(2, self.settings.k):
            detail = {"models": len(models), "clusters": self.settings.k}
            events = (Event(plan.round, "clustering-postponed", detail),)
        else:
            state, events = self._cluster(state, models, looked, plan.round)
            if self.settings.start == "mean":
                by_cluster = [[c for c in models if state.clusters[c.device] == j] for j in range(len(state.slots))]
                capped = self._capped(m for m, s in zip(by_cluster, state.slots, strict=True) if s.contributors)
        return state, Outcome(state.clusters, events, capped)

    def _capped(self, means: Iterable[list[ClientUpdate]]) -> dict[str, float]:
        return capped_devices(means, self.run.recipe.weighting, self.run.recipe.weight_cap)

    def _cluster(
        self, state: OneShotState, models: list[ClientUpdate], looked: Groups | None, round_: int
    ) -> tuple[OneShotState, tuple[Event, ...]]:
        if looked is None:
            labels = clustered(gram([c.row for c in models], backend=self.backend), self.settings.k, self.run)
        else:
            labels = looked.numbers(models)
        slots = []
        for j in range(int(labels.max()) + 1):
            members = [c for c, label in zip(models, labels, strict=True) if label == j]
            begins = self.settings.start == "mean"
            slots.append(advanced(state.origin, members if begins else [], self.run, self.average, round_))
        clusters = {c.device: int(label) for c, label in zip(models, labels, strict=True)}
        sizes = np.bincount(labels).tolist()
        events: tuple[Event, ...] = (Event(round_, "clustered", {"sizes": sizes}),)
        events = events if looked is None else (looked.event(round_, self.untrained), *events)
        state = dataclasses.replace(state, slots=tuple(slots), clusters=clusters)
        return state, events

    def final(self, state: OneShotState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Every device takes its cluster's model; one without a cluster takes the model of least loss.

        While no clusters are found, all take the one model.
        """
        if state.search is not None:
            return self.search.final(state.search, round_, devices)
        models = dict(enumerate(state.slots)) or {self.untrained: state.origin}
        assignments = {
            d: final_assignment((state.clusters[d],) if d in state.clusters else tuple(models)) for d in devices
        }
        return RoundPlan(round_, models, assignments, final=True)

    def models_of(self, state: OneShotState) -> Mapping[int, ClusterModel]:
        """Return the clusters' models, or those of the search for clusters."""
        if state.search is not None:
            return self.search.models_of(state.search)
        return dict(enumerate(state.slots))

    def retain(self, state: OneShotState, active: frozenset[str]) -> OneShotState:
        """Return the state without devices that are not ``active``."""
        return dataclasses.replace(
            state,
            clusters=retained(state.clusters, active),
            devices=tuple(d for d in state.devices if d in active),
            search=retained_search(state.search, active),
        )
