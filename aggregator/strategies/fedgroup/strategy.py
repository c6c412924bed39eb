"""FedGroup, and FedGrouProx with a proximal term: Duan et al., Algs 2 and 3, with Eqs 3 to 9.

Group cold start (Alg. 3): alpha * m devices, drawn at random, pre-train from the origin by the plan's ``pretrain``
recipe; their updates are clustered by EDC (Eq. 8) or MADC (Eq. 7), and the mean of a group's updates is its direction. Line
16 calls that mean the group's model and leaves w_0 out; a model is origin + mean here (``start = mean``), or the origin, as
Alg. 2 has it (``start = origin``). RCC draws the directions from the updates instead.

Training (Alg. 2): a cohort is drawn. Devices in it that belong to no group are placed first, in a round of their own. Then the
whole cohort trains, each device its group's model, and every group runs FedAvg by itself (lines 5 to 7); the model of an
empty group does not change (line 12). Inter-group aggregation (lines 16 to 19, intergroup.py) is off unless ``eta_g`` is
set. The auxiliary global model is the mean of the groups'; a device that never joined a group ends with it.

Placement (Eq. 9): a newcomer pre-trains from w_0 and joins the group whose direction has the highest cosine with its update.
The aggregator can't compare vectors that were masked under different keys, so the newcomer does. A direction is the difference
of two models that devices hold, w_0 and w_0 plus the direction, and devices keep both for newcomers. If no device can hand
them over, or the newcomer does not answer, it chooses by loss instead: it scores the groups' models and trains the best with
the rest of the cohort. So do all newcomers if a group has no direction: fewer than ``min_contributors`` devices were in its
mean. RAC sends newcomers to a group at random.

Beyond the paper: ``groups = auto`` finds the number of groups and repeats the cold start until they are clear
(aggregator.strategies.grouping). A group of fewer than ``min_contributors`` cold devices joins the one of the nearest direction,
since its model could not move. Where a mean needs more than one device, groups take turns under partial participation.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from aggregator.numerics.backend import Backend
from aggregator.numerics.silhouette import join_small
from aggregator.numerics.similarity import cosine_matrix
from aggregator.strategies.base import (
    ORTHOGONAL_MODES,
    Average,
    ClientUpdate,
    ClusterModel,
    Event,
    Outcome,
    RoundPlan,
    advanced,
    capped_devices,
    evaluates,
    final_assignment,
    mean_update,
    parse_settings,
    place_assignment,
    require,
    require_one_origin,
    require_proximal,
    retained,
    train_assignment,
)
from aggregator.strategies.discrepancy import discrepancy
from aggregator.strategies.drawing import drawn_in_turn
from aggregator.strategies.fedgroup import intergroup
from aggregator.strategies.fedgroup.cold_start import fewest_updates, group_updates, nearest_directions, random_centres
from aggregator.strategies.fedgroup.state import FedGroupSettings, FedGroupState
from aggregator.strategies.grouping.search import Search, SearchState, retained_search
from aggregator.strategies.settings import AUTO
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import Assignment, Phase

Step = tuple[FedGroupState, tuple[Event, ...]]


class FedGroup:
    """FedGroup on masked offsets.

    Attributes:
        auxiliary, untrained: model ids of the auxiliary global model and of the origin; groups have 0 to m - 1, and the models
            of their directions the ids after ``untrained``.
        proximal: whether devices must train with a proximal term.
    """

    name = "fedgroup"
    proximal = False
    settings_type = FedGroupSettings
    state_type = FedGroupState
    modes = ORTHOGONAL_MODES

    def __init__(self, run: RunPlan, backend: Backend | None = None, average: Average = mean_update) -> None:
        self.run = run
        self.backend = backend
        self.average = average
        self.settings: FedGroupSettings = parse_settings(FedGroupSettings, run)
        self.settings.check()
        if self.proximal:
            require_proximal(run)
        require(run.recipe.rounds > 1, f"{self.name} takes a round of its own before the first one of training")
        require_one_origin(run)
        most = self.settings.most_groups
        self.auxiliary = most
        self.untrained = most + 1
        self.search = Search(run, backend, average, weighting=run.recipe.weighting, first_id=2 * most + 2)

    @staticmethod
    def models(run: RunPlan) -> int:
        """Most models a run names at a time: the groups' and those of their directions, the auxiliary one, the origin."""
        settings: FedGroupSettings = parse_settings(FedGroupSettings, run)
        return 2 * settings.most_groups + 2 + (Search.models() if settings.groups == AUTO else 0)

    def init(self, devices: tuple[str, ...]) -> FedGroupState:
        """Return the state before round 1: no groups yet."""
        return FedGroupState(devices=devices, search=SearchState() if self.settings.groups == AUTO else None)

    def plan(self, state: FedGroupState, round_: int, available: tuple[str, ...]) -> tuple[FedGroupState, RoundPlan]:
        """The group cold start, the placement of a cohort's newcomers, or the cohort's training."""
        if state.search is not None:
            return state, self.search.plan(state.search, round_, available)
        if not state.since:
            count = min(self.settings.alpha * self.settings.groups, len(available))
            chosen = self._random(round_).choice(len(available), count, replace=False)
            return state, self._pretraining(state, round_, tuple(available[i] for i in sorted(chosen)))
        there = frozenset(available)
        waiting = tuple(d for d in state.cohort if d in there)
        cohort, asked = waiting, state.asked
        if not cohort:
            cohort, asked = drawn_in_turn(self.run, round_, available, state.clusters, state.asked)
        state = dataclasses.replace(state, cohort=(), asked=asked)
        cold = tuple(d for d in cohort if d not in state.clusters)
        if self.settings.rac:
            places = self._random(round_).integers(len(state.slots), size=len(cold)).tolist()
            state = dataclasses.replace(state, clusters={**state.clusters, **dict(zip(cold, places, strict=True))})
        cold = tuple(d for d in cold if d not in state.tried)
        # One group leaves nothing to compare: a newcomer trains its model, and joins it so.
        if not cold or len(state.directions) < 2:
            return self._cohort(state, round_, cohort)
        placement = dataclasses.replace(
            self._placement(state, round_, cold), otherwise=self._cohort(state, round_, cohort)
        )
        return dataclasses.replace(state, cohort=cohort), placement

    def _placement(self, state: FedGroupState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        directions = self._directions(state)
        assignment = place_assignment(self.untrained, tuple(directions))
        return RoundPlan(round_, {self.untrained: state.origin, **directions}, dict.fromkeys(devices, assignment))

    def _directions(self, state: FedGroupState) -> dict[int, ClusterModel]:
        """Return the models along which the groups moved from the origin, by the ids under which devices know them."""
        return {self.untrained + 1 + j: model for j, model in enumerate(state.directions)}

    def _cohort(self, state: FedGroupState, round_: int, cohort: tuple[str, ...]) -> tuple[FedGroupState, RoundPlan]:
        evaluate = evaluates(self.run, round_)
        assignments = {d: self._training(state, d, evaluate=evaluate) for d in cohort}
        # Devices add up the groups' models, and each holds only its own group's.
        seal = frozenset(range(len(state.slots)) if self._adds else ())
        used = sorted(seal.union(*(o.candidates for o in assignments.values())))
        return state, RoundPlan(round_, {j: state.slots[j] for j in used}, assignments, seal=seal)

    def _random(self, round_: int) -> np.random.Generator:
        # The 1 makes this another stream than that of `drawn`, which uses the same seed and round.
        return np.random.default_rng([self.run.seed, round_, 1])

    def _training(self, state: FedGroupState, device: str, *, evaluate: bool) -> Assignment:
        own = state.clusters.get(device)
        groups = tuple(range(len(state.slots))) if own is None else (own,)
        return dataclasses.replace(train_assignment(groups, evaluate=evaluate), norm=self._adds)

    @property
    def _adds(self) -> bool:
        """Whether groups' models are added up."""
        return self.settings.eta_g > 0

    def _pretraining(self, state: FedGroupState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        assignment = train_assignment((self.untrained,), evaluate=False, phase=Phase.PRETRAIN)
        return RoundPlan(round_, {self.untrained: state.origin}, dict.fromkeys(devices, assignment))

    def close(self, state: FedGroupState, plan: RoundPlan, given: list[ClientUpdate]) -> tuple[FedGroupState, Outcome]:
        """Alg. 3 after pre-training, Eq. 9 after a placement, else Alg. 2 lines 5 to 7."""
        capped: dict[str, float] = {}
        if state.search is not None:
            return self._sought(state, state.search, given, plan)
        if not state.since:
            state, events = self._start(state, given, plan.round)
        elif any(o.phase is Phase.PLACE for o in plan.assignments.values()):
            state, events = self._place(state, given, plan)
        else:
            means = [[c for c in given if c.model == j] for j in range(len(state.slots))]
            least = max(1, self.run.recipe.min_contributors)
            capped = capped_devices(
                (m for m in means if len(m) >= least), self.run.recipe.weighting, self.run.recipe.weight_cap
            )
            state, events = self._train(state, given, plan.round)
        return state, Outcome(state.clusters, events, capped)

    def _sought(
        self, state: FedGroupState, search: SearchState, given: list[ClientUpdate], plan: RoundPlan
    ) -> tuple[FedGroupState, Outcome]:
        """Close a round of the search for groups."""
        after, found, events = self.search.close(search, given, plan.round)
        capped = capped_devices(self.search.means(search, given), self.run.recipe.weighting, self.run.recipe.weight_cap)
        if found is None:
            state = dataclasses.replace(state, search=after)
            return state, Outcome(dict.fromkeys((*state.devices, *plan.assignments), 0), events, capped)
        state = dataclasses.replace(
            state,
            slots=found.groups,
            directions=() if self.settings.rac else found.directions,
            since=plan.round,
            clusters=found.clusters,
            lengths=(0.0,) * len(found.groups),
            search=None,
        )
        return state, Outcome(state.clusters, events, capped)

    def _start(self, state: FedGroupState, given: list[ClientUpdate], round_: int) -> Step:
        """Alg. 3, lines 6 to 18."""
        s = self.settings
        needed = fewest_updates(s.groups, s.measure)
        if len(given) < needed:
            return state, (Event(round_, "cold-start-postponed", {"updates": len(given), "needed": needed}),)
        rows = [c.row for c in given]
        if s.rcc:
            chosen = random_centres(rows, s.groups, self.run.seed)
            labels, count = nearest_directions(rows, [rows[i] for i in chosen], self.backend), len(chosen)
        else:
            grouped = group_updates(rows, s.groups, s.measure, self.run.seed, self.backend)
            if self.run.recipe.min_contributors > 1:
                grouped = join_small(
                    cosine_matrix(rows, backend=self.backend), grouped, self.run.recipe.min_contributors
                )
            labels, count = grouped.tolist(), int(grouped.max()) + 1
        means = []
        for j in range(count):
            members = [c for c, label in zip(given, labels, strict=True) if label == j]
            means.append(self._from_origin(state, members, round_))
        directions = means
        if s.rcc:
            directions = [self._from_origin(state, [given[i]], round_) for i in chosen]
        # Without all directions newcomers would never come to some of the groups.
        compares = not s.rac and all(model is not state.origin for model in directions)
        clusters = {c.device: label for c, label in zip(given, labels, strict=True)}
        sizes = [labels.count(j) for j in range(count)]
        state = dataclasses.replace(
            state,
            slots=tuple(means) if s.start == "mean" else (state.origin,) * count,
            directions=tuple(directions) if compares else (),
            since=round_,
            clusters=clusters,
            lengths=(0.0,) * count,
        )
        return state, (Event(round_, "cold-start", {"devices": len(given), "sizes": sizes}),)

    def _from_origin(self, state: FedGroupState, members: list[ClientUpdate], round_: int) -> ClusterModel:
        """Return w_0 plus the members' mean update; w_0 itself if they are too few for a mean."""
        if len(members) < max(1, self.run.recipe.min_contributors):
            return state.origin
        return state.origin.moved(self.average(members, "uniform"), len(members), round_)

    def _place(self, state: FedGroupState, given: list[ClientUpdate], plan: RoundPlan) -> Step:
        """Eq. 9."""
        placed = {c.device: c.nearest - self.untrained - 1 for c in given}
        tried = tuple(sorted({*state.tried, *plan.assignments} - placed.keys()))
        state = dataclasses.replace(state, clusters={**state.clusters, **placed}, tried=tried)
        return state, (Event(plan.round, "newcomers", {"groups": placed, "by": "direction"}),)

    def _train(self, state: FedGroupState, given: list[ClientUpdate], round_: int) -> Step:
        by_group = [[c for c in given if c.model == j] for j in range(len(state.slots))]
        slots = tuple(
            advanced(s, mine, self.run, self.average, round_) for s, mine in zip(state.slots, by_group, strict=True)
        )
        joined = {c.device: c.model for c in given if c.device not in state.clusters}
        events: tuple[Event, ...] = ()
        if joined:
            events = (Event(round_, "newcomers", {"groups": joined, "by": "loss"}),)
        if self.settings.discrepancy:
            before, after = dict(enumerate(state.slots)), dict(enumerate(slots))
            events += discrepancy(given, before, after, round_)
        lengths = state.lengths
        if self._adds:
            lengths = tuple(
                known if after is before else self._length_after(mine, before, after)
                for known, mine, before, after in zip(lengths, by_group, state.slots, slots, strict=True)
            )
            added = intergroup.aggregate(slots, lengths, self.settings.eta_g, round_)
            if all(intergroup.fits(s, self.run.recipe.norm_limit * round_) for s in added):
                slots = added
            else:
                events += (Event(round_, "intergroup-refused", {"lengths": list(lengths)}),)
                lengths = state.lengths
        clusters = {**state.clusters, **joined}
        return dataclasses.replace(state, slots=slots, clusters=clusters, lengths=lengths), events

    def _length_after(self, given: list[ClientUpdate], before: ClusterModel, after: ClusterModel) -> float:
        return intergroup.length_after(given, before, after, self.run.recipe.weighting, self.run.recipe.weight_cap)

    def final(self, state: FedGroupState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Every device takes its group's model; one that no group knows takes the auxiliary global model.

        While no groups are found, all take the one model.
        """
        if state.search is not None:
            one = self.search.one
            return RoundPlan(
                round_, {one: state.search.one}, dict.fromkeys(devices, final_assignment((one,))), final=True
            )
        models = {**dict(enumerate(state.slots)), self.auxiliary: state.auxiliary}
        assignments = {d: final_assignment((state.clusters.get(d, self.auxiliary),)) for d in devices}
        used = {o.candidates[0] for o in assignments.values()}
        return RoundPlan(round_, {j: s for j, s in models.items() if j in used}, assignments, final=True)

    def models_of(self, state: FedGroupState) -> Mapping[int, ClusterModel]:
        """Return the groups' models, those of their directions and, once there are groups, the auxiliary model."""
        if state.search is not None:
            return self.search.models_of(state.search)
        if not state.since:
            return {}
        return {**dict(enumerate(state.slots)), self.auxiliary: state.auxiliary, **self._directions(state)}

    def scaling(self, state: FedGroupState) -> dict[int, tuple[int, tuple[str, ...]]]:
        """Return the groups and their devices; none if models are added up, which would be in unlike scales. See `Scaling`."""
        if self._adds:
            return {}
        return {j: (j, tuple(d for d, at in state.clusters.items() if at == j)) for j in range(len(state.slots))}

    def rescaled(self, state: FedGroupState, _given: Mapping[int, list[ClientUpdate]]) -> FedGroupState:
        """Groups stay as they are."""
        return state

    def retain(self, state: FedGroupState, active: frozenset[str]) -> FedGroupState:
        """Return the state without devices that are not ``active``."""
        return dataclasses.replace(
            state,
            clusters=retained(state.clusters, active),
            cohort=tuple(d for d in state.cohort if d in active),
            tried=tuple(d for d in state.tried if d in active),
            devices=tuple(d for d in state.devices if d in active),
            search=retained_search(state.search, active),
        )


class FedGrouProx(FedGroup):
    """Alg. 2 with FedProx inside the groups (line 14): devices are held close to their group's model by Eq. 3."""

    name = "fedgrouprox"
    proximal = True
