"""FeSEM, multi-centre federated learning by stochastic expectation maximisation: fedgroup section II-B and its baseline.

There are k centres. In each round a device trains its centre's model. It is then assigned to the centre nearest to its
trained model in l2 distance (E step), and each centre becomes the mean of its members' models (M step).

All centres are equal at first, so the first assignment is random (seeded, with sizes as even as possible); at a tie a
device stays at its centre. So does a device that takes no part in a round. A centre with fewer than ``min_contributors`` of
the round's devices does not change.

Under round keys devices hold all centres, measure the distances themselves and report the nearest. A centre becomes the mean
of the models that its members trained from, weighted by their members, plus the mean of the members' updates.

With one key for the run the aggregator measures masked offsets: with O_c a centre's offset and delta_i a device's update, the
device's model is origin + O_c + delta_i. All centres share one origin, so it cancels in |w_i - w_j| = |O_c + delta_i - O_j|,
and the mask does not change distances. Such a run is planned with one mask epoch, since offsets from one origin are compared.
If the owner ends the epoch, to revoke a device, every centre gets an origin of its own and offsets can no longer be compared.
From then on devices stay at their centre, each centre runs FedAvg by itself, and a newcomer takes the centre of least loss.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final

import numpy as np

from aggregator.numerics.backend import Backend
from aggregator.numerics.distances import squared_distances
from aggregator.strategies.base import (
    ORTHOGONAL_MODES,
    Average,
    ClientUpdate,
    ClusterModel,
    Event,
    Gathered,
    Outcome,
    RoundPlan,
    capped_devices,
    drawn,
    evaluates,
    final_assignment,
    gather,
    in_order,
    mean_update,
    parse_settings,
    require,
    require_one_origin,
    starts_of,
    train_assignment,
    weights_of,
)
from aggregator.strategies.discrepancy import discrepancy
from aggregator.strategies.renewal import Inherited, Renewal, fresh_slot, retained
from aggregator.strategies.settings import StrategySettings
from shoal import limits
from shoal.protocol.documents import Capabilities, RunPlan

MOST_COMPARED: Final = 256
"""Most centres under round keys: each centre's assignment names all of them, in an announcement of limited size."""


@dataclass(frozen=True, slots=True)
class FesemSettings(StrategySettings):
    """FeSEM's own parameters.

    Attributes:
        k: centres.
        discrepancy: report fedgroup Eq. 4 in every round.
    """

    clusters_setting: ClassVar[str] = "k"

    k: int = 2
    discrepancy: bool = False

    @property
    def capabilities(self) -> Capabilities:
        """Devices report the nearest centre; with one key for the run the aggregator measures the distances."""
        return Capabilities(compare=True)


@dataclass(frozen=True, slots=True)
class FesemState:
    """The k centres, and each device's.

    Attributes:
        frozen: a rollover has parted the centres' origins: the assignment stays as it is.
        news: events of the rollover, for the next round's outcome.
    """

    slots: tuple[ClusterModel, ...]
    clusters: Mapping[str, int] = field(default_factory=dict)
    frozen: bool = False
    news: tuple[Event, ...] = ()
    gathered: Gathered = field(default_factory=dict)


class Fesem:
    """FeSEM on masked updates."""

    name = "fesem"
    settings_type = FesemSettings
    state_type = FesemState
    modes = ORTHOGONAL_MODES

    def __init__(self, run: RunPlan, backend: Backend | None = None, average: Average = mean_update) -> None:
        self.run = run
        self.backend = backend
        self.average = average
        self.settings: FesemSettings = parse_settings(FesemSettings, run)
        most = MOST_COMPARED if run.keys == "round" else limits.MAX_MODELS
        require(1 <= self.settings.k <= most, f"k is from 1 to {most}")
        require_one_origin(run)
        require(
            run.keys == "round" or run.epoch_rounds >= run.rounds,
            f"fesem compares offsets of all {run.rounds} rounds, but the mask changes after {run.epoch_rounds}",
            "let one mask epoch cover the run",
        )

    @staticmethod
    def models(run: RunPlan) -> int:
        """Most models a run names at a time."""
        settings: FesemSettings = parse_settings(FesemSettings, run)
        return settings.k

    def init(self, devices: tuple[str, ...]) -> FesemState:
        """Return the state before round 1: all centres at the origin, devices assigned at random."""
        return self._welcome(FesemState(tuple(ClusterModel() for _ in range(self.settings.k))), devices, 0)

    def _welcome(self, state: FesemState, devices: Iterable[str], round_: int) -> FesemState:
        new = sorted(set(devices) - set(state.clusters))
        if not new:
            return state
        k = self.settings.k
        # The centres' order is drawn too: a newcomer alone must not always come to the first one.
        rng = np.random.default_rng([self.run.seed, round_])
        assignment, places = rng.permutation(k), rng.permutation(len(new))
        chosen = {d: int(assignment[p % k]) for d, p in zip(new, places, strict=True)}
        return dataclasses.replace(state, clusters={**state.clusters, **chosen})

    def plan(self, state: FesemState, round_: int, available: tuple[str, ...]) -> tuple[FesemState, RoundPlan]:
        """Those drawn train their centre's model; one that has none yet, once they are frozen, the model of least loss."""
        if not state.frozen:
            state = self._welcome(state, available, round_)
        evaluate = evaluates(self.run, round_)
        places = {d: self._candidates(state, d) for d in drawn(self.run, round_, available)}
        compare = tuple(range(self.settings.k)) if self.run.keys == "round" else ()
        assignments = {
            d: dataclasses.replace(train_assignment(candidates, evaluate=evaluate), compare=compare)
            for d, candidates in places.items()
        }
        models = {j: state.slots[j] for j in sorted({j for a in assignments.values() for j in a.models})}
        return state, RoundPlan(round_, models, assignments)

    def _candidates(self, state: FesemState, device: str) -> tuple[int, ...]:
        own = state.clusters.get(device)
        return tuple(range(self.settings.k)) if own is None else (own,)

    def absorb(self, state: FesemState, contribution: ClientUpdate) -> FesemState:
        """Keep the contribution for `close`."""
        return dataclasses.replace(state, gathered=gather(state.gathered, contribution, self.run))

    def close(self, state: FesemState, plan: RoundPlan) -> tuple[FesemState, Outcome]:
        """E step for the devices that took part, then M step."""
        given = in_order(state.gathered.values())
        nearest = self._nearest(state, given)
        members = [[c for c in given if nearest[c.device] == j] for j in range(self.settings.k)]
        slots = tuple(self._centre(state.slots, j, mine, plan.round) for j, mine in enumerate(members))
        means = [m for m, before, after in zip(members, state.slots, slots, strict=True) if after is not before]
        capped = capped_devices(means, self.run.weighting, self.run.weight_cap)
        moved = {d: j for d, j in nearest.items() if state.clusters.get(d) != j}
        events = state.news
        clusters = {**state.clusters, **nearest}
        if moved and state.frozen:
            details = [{"device": d, "cluster": j, "by": "loss"} for d, j in moved.items()]
            events += tuple(Event(plan.round, "newcomer", detail) for detail in details)
        elif moved:
            sizes = Counter(clusters.values())
            detail = {"moved": len(moved), "sizes": [sizes.get(j, 0) for j in range(self.settings.k)]}
            events += (Event(plan.round, "reassigned", detail),)
        if self.settings.discrepancy:
            before, after = dict(enumerate(state.slots)), dict(enumerate(slots))
            # Under round keys the aggregator can't tell how far a centre that mixes several models has moved.
            mixed = any((a.origin, a.others) != (b.origin, b.others) for a, b in zip(slots, state.slots, strict=True))
            events += discrepancy(given, before, None if mixed else after, plan.round)
        return FesemState(slots, clusters, state.frozen), Outcome(clusters, events, capped)

    def _nearest(self, state: FesemState, given: list[ClientUpdate]) -> dict[str, int]:
        """Return the nearest centre of each trained model; its own if no other is nearer."""
        if self.run.keys == "round":
            return {c.device: c.nearest for c in given}
        if state.frozen:
            return {c.device: c.model for c in given}
        return self._measured(state.slots, given)

    def _measured(self, slots: tuple[ClusterModel, ...], given: list[ClientUpdate]) -> dict[str, int]:
        """Return the nearest centre of each trained model, measured on masked offsets."""
        nearest = {}
        for own, slot in enumerate(slots):
            mine = [c for c in given if c.model == own]
            if not mine:
                continue
            rows = [c.row for c in mine]
            # |O_own + delta_i - O_j|: the update against the other centres as seen from its own.
            # The sum makes a vector of the scalar 0 that `_apart` may return.
            centres = [np.zeros_like(rows[0]) + _apart(other, slot) for other in slots]
            distances = squared_distances(rows, centres, backend=self.backend)
            for c, row in zip(mine, distances, strict=True):
                nearest[c.device] = own if row[own] <= row.min() else int(row.argmin())
        return nearest

    def _centre(
        self, slots: tuple[ClusterModel, ...], j: int, members: list[ClientUpdate], round_: int
    ) -> ClusterModel:
        """Return centre j as the mean of its members' models; unchanged if too few are its members."""
        if len(members) < max(1, self.run.min_contributors):
            return slots[j]
        change = self.average(members, self.run.weighting, self.run.weight_cap)
        if self.run.keys == "round":
            return self._mean_of_starts(slots, members).moved(change, len(members), round_)
        weight = [float(w) for w in weights_of(members, self.run.weighting, self.run.weight_cap)]
        fewest = len(members)
        for origin in sorted({c.model for c in members} - {j}):
            share = sum(w for w, c in zip(weight, members, strict=True) if c.model == origin) / sum(weight)
            change = change + np.float32(share) * _apart(slots[origin], slots[j])
            if slots[origin].offset is not None:
                fewest = min(fewest, slots[origin].contributors)
        return slots[j].moved(change, fewest, round_)

    def _mean_of_starts(self, slots: tuple[ClusterModel, ...], members: list[ClientUpdate]) -> ClusterModel:
        """Return the weighted mean of the centres that members trained from, each at a state that devices hold."""
        weights = weights_of(members, self.run.weighting, self.run.weight_cap).tolist()
        starts = starts_of((w, slots[c.model]) for w, c in zip(weights, members, strict=True))
        total = sum(starts.values())
        (first, share), *others = ((number, weight / total) for number, weight in sorted(starts.items()))
        return ClusterModel(first, scale=share, others=tuple((weight, number) for number, weight in others))

    def final(self, state: FesemState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Every device takes its centre's model; one that has none takes the model of least loss."""
        assignments = {d: final_assignment(self._candidates(state, d)) for d in devices}
        return RoundPlan(round_, dict(enumerate(state.slots)), assignments, final=True)

    def inherited(self, state: FesemState) -> Inherited:
        """All centres outlive the mask epoch; while none has moved they are one model."""
        return Inherited({0: state.slots[0]} if _coincide(state) else dict(enumerate(state.slots)))

    def renewed(self, state: FesemState, renewal: Renewal) -> FesemState:
        """Return the state in the next mask epoch; with origins of their own the centres' devices stay as they are."""
        if _coincide(state):
            return FesemState((fresh_slot(renewal, 0),) * len(state.slots), state.clusters)
        slots = tuple(fresh_slot(renewal, j) for j in range(len(state.slots)))
        told = () if state.frozen else (Event(renewal.round, "assignment-frozen", {}),)
        return FesemState(slots, state.clusters, frozen=True, news=(*state.news, *told))

    def retain(self, state: FesemState, active: frozenset[str]) -> FesemState:
        """Return the state without devices that are not ``active``."""
        return dataclasses.replace(state, clusters=retained(state.clusters, active))


def _coincide(state: FesemState) -> bool:
    """Whether all centres are one model still: no origin of their own, and no offset."""
    return not state.frozen and all(s.offset is None for s in state.slots)


def _apart(one: ClusterModel, other: ClusterModel) -> Any:
    """Return O_one - O_other, shape (d,), float32; 0 where both are at the origin."""
    if one.offset is None:
        return np.float32(0) if other.offset is None else -other.offset
    return one.offset if other.offset is None else one.offset - other.offset
