"""FeSEM, multi-centre federated learning by stochastic expectation maximisation: fedgroup section II-B and its baseline.

There are k centres. In each round a device trains its centre's model. It is then assigned to the centre nearest to its
trained model in l2 distance (E step), and each centre becomes the mean of its members' models (M step).

All centres are equal at first, so the first assignment is random (seeded, with sizes as even as possible); at a tie a
device stays at its centre. So does a device that takes no part in a round. A centre with fewer than ``min_contributors`` of
the round's devices does not change; where a mean needs more than one device, centres take turns under partial participation.

Devices hold all centres, measure the distances themselves and report the nearest. A centre becomes the mean of the models that
its members trained from, weighted by their members, plus the mean of the members' updates.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Final

import numpy as np

from aggregator.strategies.base import (
    ClientUpdate,
    ClusterModel,
    Common,
    Event,
    Outcome,
    RoundPlan,
    StrategySettings,
    capped_devices,
    evaluates,
    final_assignment,
    parse_settings,
    require,
    require_one_segment,
    retained,
    starts_of,
    train_assignment,
    weights_of,
)
from aggregator.strategies.discrepancy import discrepancy
from aggregator.strategies.drawing import drawn_in_turn
from shoal.protocol.documents import Capabilities, RunPlan

MOST_COMPARED: Final = 256
"""Most centres: each centre's assignment names all of them, in an announcement of limited size."""


@dataclass(frozen=True, slots=True)
class FesemSettings(StrategySettings):
    """FeSEM's own parameters.

    Attributes:
        k: centres.
        discrepancy: report fedgroup Eq. 4 in every round.
    """

    clusters_setting: ClassVar[str] = "k"
    most_kept: ClassVar[int] = MOST_COMPARED

    k: int = 2
    discrepancy: bool = False

    @property
    def capabilities(self) -> Capabilities:
        """Devices report the nearest centre."""
        return Capabilities(compare=True)


@dataclass(frozen=True, slots=True)
class FesemState:
    """The k centres, each device's, and the last round in which a centre had its turn (`drawing.drawn_in_turn`)."""

    slots: tuple[ClusterModel, ...]
    clusters: Mapping[str, int] = field(default_factory=dict)
    asked: Mapping[int, int] = field(default_factory=dict)


class Fesem(Common):
    """FeSEM on masked updates."""

    name = "fesem"
    settings_type = FesemSettings
    settings: FesemSettings
    state_type = FesemState

    def prepare(self) -> None:
        """Check the run and its settings, and make what follows from them."""
        require(1 <= self.settings.k <= MOST_COMPARED, f"k is from 1 to {MOST_COMPARED}")
        require_one_segment(self.run)

    @staticmethod
    def models(run: RunPlan) -> int:
        """Most models a run names at a time."""
        settings: FesemSettings = parse_settings(FesemSettings, run)
        return settings.k

    def init(self, devices: tuple[str, ...]) -> FesemState:
        """Return the state before round 1: all centres at the origin, devices assigned at random.

        If it begins with the models of an earlier run, these are the centres, and devices choose theirs by loss.
        """
        centres = tuple(ClusterModel(j % self.run.origins) for j in range(self.settings.k))
        return self._welcome(FesemState(centres), devices, 0)

    def _welcome(self, state: FesemState, devices: Iterable[str], round_: int) -> FesemState:
        new = sorted(set(devices) - set(state.clusters))
        if not new or self.run.origins > 1:
            return state
        k = self.settings.k
        # The centres' order is drawn too: a newcomer alone must not always come to the first one.
        rng = np.random.default_rng([self.run.seed, round_])
        assignment, places = rng.permutation(k), rng.permutation(len(new))
        chosen = {d: int(assignment[p % k]) for d, p in zip(new, places, strict=True)}
        return dataclasses.replace(state, clusters={**state.clusters, **chosen})

    def plan(self, state: FesemState, round_: int, available: tuple[str, ...]) -> tuple[FesemState, RoundPlan]:
        """Those drawn train their centre's model and compare the result with all centres."""
        state = self._welcome(state, available, round_)
        evaluate = evaluates(self.run, round_)
        compare = tuple(range(self.settings.k))
        chosen, asked = drawn_in_turn(self.run, round_, available, state.clusters, state.asked)
        state = dataclasses.replace(state, asked=asked)
        own = {device: (centre,) for device, centre in state.clusters.items()}
        assignments = {
            d: dataclasses.replace(train_assignment(own.get(d, compare), evaluate=evaluate), compare=compare)
            for d in chosen
        }
        models = {j: state.slots[j] for j in sorted({j for a in assignments.values() for j in a.models})}
        return state, RoundPlan(round_, models, assignments)

    def close(self, state: FesemState, plan: RoundPlan, given: list[ClientUpdate]) -> tuple[FesemState, Outcome]:
        """E step for the devices that took part, then M step."""
        nearest = {c.device: c.nearest for c in given}
        members = [[c for c in given if nearest[c.device] == j] for j in range(self.settings.k)]
        slots = tuple(self._centre(state.slots, j, mine, plan.round) for j, mine in enumerate(members))
        means = [m for m, before, after in zip(members, state.slots, slots, strict=True) if after is not before]
        capped = capped_devices(means, self.run.recipe.weighting, self.run.recipe.weight_cap)
        moved = {d: j for d, j in nearest.items() if state.clusters.get(d) != j}
        events: tuple[Event, ...] = ()
        clusters = {**state.clusters, **nearest}
        if moved:
            sizes = Counter(clusters.values())
            detail = {"moved": len(moved), "sizes": [sizes.get(j, 0) for j in range(self.settings.k)]}
            events += (Event(plan.round, "reassigned", detail),)
        if self.settings.discrepancy:
            before, after = dict(enumerate(state.slots)), dict(enumerate(slots))
            # The aggregator can't tell how far a centre that mixes several models has moved.
            mixed = any((a.origin, a.others) != (b.origin, b.others) for a, b in zip(slots, state.slots, strict=True))
            events += discrepancy(given, before, None if mixed else after, plan.round)
        state = dataclasses.replace(state, slots=slots, clusters=clusters)
        return state, Outcome(clusters, events, capped)

    def _centre(
        self, slots: tuple[ClusterModel, ...], j: int, members: list[ClientUpdate], round_: int
    ) -> ClusterModel:
        """Return centre j as the mean of its members' models; unchanged if too few are its members."""
        if len(members) < max(1, self.run.recipe.min_contributors):
            return slots[j]
        change = self.average(members, self.run.recipe.weighting, self.run.recipe.weight_cap)
        return self._mean_of_starts(slots, members).moved(change, len(members), round_)

    def _mean_of_starts(self, slots: tuple[ClusterModel, ...], members: list[ClientUpdate]) -> ClusterModel:
        """Return the weighted mean of the centres that members trained from, each at a state that devices hold."""
        weights = weights_of(members, self.run.recipe.weighting, self.run.recipe.weight_cap).tolist()
        starts = starts_of((w, slots[c.model]) for w, c in zip(weights, members, strict=True))
        total = sum(starts.values())
        (first, share), *others = ((number, weight / total) for number, weight in sorted(starts.items()))
        return ClusterModel(first, scale=share, others=tuple((weight, number) for number, weight in others))

    def final(self, state: FesemState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Every device takes its centre's model; one that has none takes the model of least loss."""
        every = tuple(range(self.settings.k))
        assignments = {d: final_assignment((state.clusters[d],) if d in state.clusters else every) for d in devices}
        return RoundPlan(round_, dict(enumerate(state.slots)), assignments, final=True)

    def models_of(self, state: FesemState) -> Mapping[int, ClusterModel]:
        """Return the centres."""
        return dict(enumerate(state.slots))

    def retain(self, state: FesemState, active: frozenset[str]) -> FesemState:
        """Return the state without devices that are not ``active``."""
        return dataclasses.replace(state, clusters=retained(state.clusters, active))
