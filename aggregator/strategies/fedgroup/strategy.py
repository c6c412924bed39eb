"""FedGroup: Duan et al., Algs 2 and 3, with Eqs 4 to 9.

Group cold start (Alg. 3): alpha * m devices, drawn at random, pre-train from the origin by the plan's ``pretrain``
recipe; their updates are clustered by EDC (Eq. 8) or MADC (Eq. 7). Line 16 calls the mean of a group's updates its model and
leaves w_0 out; a model is origin + mean here (``start = mean``), or the origin, as Alg. 2 has it (``start = origin``). RCC
draws the directions that updates are compared with instead.

Training (Alg. 2): a cohort is drawn, and each device in it trains its group's model. Every group runs FedAvg by itself
(lines 5 to 7); the model of an empty group does not change (line 12). Inter-group aggregation (lines 16 to 19,
intergroup.py) is off unless ``eta_g`` is set. The auxiliary global model is the mean of the groups'; a device that never
joined a group ends with it.

Newcomers don't pre-train: the groups' directions, which Eq. 9 compares their updates with, were masked under another key.
They score the groups' models, train the best with the rest of the cohort, and join the group that they chose. RAC sends them
to one at random instead.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np

from aggregator.numerics.backend import Backend
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
    drawn,
    evaluates,
    final_assignment,
    gather,
    in_order,
    mean_update,
    parse_settings,
    require,
    require_one_origin,
    retained,
    train_assignment,
)
from aggregator.strategies.discrepancy import discrepancy
from aggregator.strategies.fedgroup import intergroup
from aggregator.strategies.fedgroup.cold_start import fewest_updates, group_updates, nearest_directions, random_centres
from aggregator.strategies.fedgroup.state import FedGroupSettings, FedGroupState
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import Assignment, Phase

Step = tuple[FedGroupState, tuple[Event, ...]]


class FedGroup:
    """FedGroup on masked offsets.

    Attributes:
        auxiliary, untrained: model ids of the auxiliary global model and of the origin; groups have 0 to m - 1.
    """

    name = "fedgroup"
    settings_type = FedGroupSettings
    state_type = FedGroupState
    modes = ORTHOGONAL_MODES

    def __init__(self, run: RunPlan, backend: Backend | None = None, average: Average = mean_update) -> None:
        self.run = run
        self.backend = backend
        self.average = average
        self.settings: FedGroupSettings = parse_settings(FedGroupSettings, run)
        self.settings.check()
        require(run.rounds > 1, f"{self.name} takes a round of its own before the first one of training")
        require_one_origin(run)
        self.auxiliary = self.settings.groups
        self.untrained = self.settings.groups + 1

    @staticmethod
    def models(run: RunPlan) -> int:
        """Most models a run names at a time: the groups', the auxiliary one, the origin."""
        settings: FedGroupSettings = parse_settings(FedGroupSettings, run)
        return settings.groups + 2

    def init(self, _devices: tuple[str, ...]) -> FedGroupState:
        """Return the state before round 1: no groups yet."""
        return FedGroupState()

    def plan(self, state: FedGroupState, round_: int, available: tuple[str, ...]) -> tuple[FedGroupState, RoundPlan]:
        """The group cold start, or the training of a cohort."""
        if not state.since:
            count = min(self.settings.alpha * self.settings.groups, len(available))
            chosen = self._random(round_).choice(len(available), count, replace=False)
            return state, self._pretraining(state, round_, tuple(available[i] for i in sorted(chosen)))
        cohort = drawn(self.run, round_, available)
        if self.settings.rac:
            cold = tuple(d for d in cohort if d not in state.clusters)
            places = self._random(round_).integers(len(state.slots), size=len(cold)).tolist()
            state = dataclasses.replace(state, clusters={**state.clusters, **dict(zip(cold, places, strict=True))})
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

    def absorb(self, state: FedGroupState, contribution: ClientUpdate) -> FedGroupState:
        """Keep the contribution for `close`."""
        return dataclasses.replace(state, gathered=gather(state.gathered, contribution))

    def close(self, state: FedGroupState, plan: RoundPlan) -> tuple[FedGroupState, Outcome]:
        """Alg. 3 after pre-training, else Alg. 2 lines 5 to 7."""
        given = in_order(state.gathered.values())
        state = dataclasses.replace(state, gathered={})
        capped: dict[str, float] = {}
        if not state.since:
            state, events = self._start(state, given, plan.round)
        else:
            means = [[c for c in given if c.model == j] for j in range(len(state.slots))]
            least = max(1, self.run.min_contributors)
            capped = capped_devices((m for m in means if len(m) >= least), self.run.weighting, self.run.weight_cap)
            state, events = self._train(state, given, plan.round)
        return state, Outcome(state.clusters, events, capped)

    def _start(self, state: FedGroupState, given: list[ClientUpdate], round_: int) -> Step:
        """Alg. 3, lines 6 to 18."""
        s = self.settings
        needed = fewest_updates(s.groups, s.measure)
        if len(given) < needed:
            return state, (Event(round_, "cold-start-postponed", {"updates": len(given), "needed": needed}),)
        rows = [c.row for c in given]
        if s.rcc:
            centres = [rows[i] for i in random_centres(rows, s.groups, self.run.seed)]
            labels, count = nearest_directions(rows, centres, self.backend), len(centres)
        else:
            labels = group_updates(rows, s.groups, s.measure, self.run.seed, self.backend).tolist()
            count = max(labels) + 1
        slots = []
        for j in range(count):
            members = [c for c, label in zip(given, labels, strict=True) if label == j]
            enough = s.start == "mean" and len(members) >= max(1, self.run.min_contributors)
            begin = state.origin
            slots.append(begin.moved(self.average(members, "uniform"), len(members), round_) if enough else begin)
        clusters = {c.device: label for c, label in zip(given, labels, strict=True)}
        sizes = [labels.count(j) for j in range(len(slots))]
        state = dataclasses.replace(
            state,
            slots=tuple(slots),
            since=round_,
            clusters=clusters,
            lengths=(0.0,) * len(slots),
        )
        return state, (Event(round_, "cold-start", {"devices": len(given), "sizes": sizes}),)

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
            if all(intergroup.fits(s, self.run.norm_limit * round_) for s in added):
                slots = added
            else:
                events += (Event(round_, "intergroup-refused", {"lengths": list(lengths)}),)
                lengths = state.lengths
        clusters = {**state.clusters, **joined}
        return dataclasses.replace(state, slots=slots, clusters=clusters, lengths=lengths), events

    def _length_after(self, given: list[ClientUpdate], before: ClusterModel, after: ClusterModel) -> float:
        return intergroup.length_after(given, before, after, self.run.weighting, self.run.weight_cap)

    def final(self, state: FedGroupState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Every device takes its group's model; one that no group knows takes the auxiliary global model."""
        models = {**dict(enumerate(state.slots)), self.auxiliary: state.auxiliary}
        assignments = {d: final_assignment((state.clusters.get(d, self.auxiliary),)) for d in devices}
        used = {o.candidates[0] for o in assignments.values()}
        return RoundPlan(round_, {j: s for j, s in models.items() if j in used}, assignments, final=True)

    def models_of(self, state: FedGroupState) -> Mapping[int, ClusterModel]:
        """Return the groups' models and, once there are groups, the auxiliary model."""
        return {**dict(enumerate(state.slots)), self.auxiliary: state.auxiliary} if state.since else {}

    def retain(self, state: FedGroupState, active: frozenset[str]) -> FedGroupState:
        """Return the state without devices that are not ``active``."""
        return dataclasses.replace(state, clusters=retained(state.clusters, active))
