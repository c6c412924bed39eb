"""Rounds of statistics before and among the rounds of any strategy, for tasks that standardise with the fleet's figures.

`Standardised` wraps a strategy. One more model, `STATISTICS_MODEL`, starts from the zero vector that the owner seals as the
last origin. In the first round all available devices add their statistics to it instead of an update: masked like one, so the
aggregator sees neither a device's figures nor their mean. Once the mean of at least ``min_contributors`` devices has moved that
model, the wrapped strategy plans every round, and each round offers the model too, so that devices which come later get it as
they get every other model.

A strategy that forms clusters names those that need statistics of their own (`Scaling`). Their devices upload in another
such round how theirs differ from the statistics that the cluster's model is in, and the mean difference moves the cluster's
statistics away from those. A model of a cluster without any takes those of the cluster that it came from, or the fleet's.

Rules:

- The wrapped strategy sees the plan without the extra origin, models and setting, and no statistics.
- A round of too few statistics of the fleet is repeated; those of a cluster are asked for once. Both count as rounds of the plan.
- No means of statistics, however they are combined, tell those of fewer than ``min_contributors`` devices: see `shown_together`.
- If devices lose the model (`aggregator.rounds.opening`), it is rolled back to its checkpoint, or to zero and is made again.

Example: FedAvg of three devices plans statistics for round 1 and, after their mean, training for round 2.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import field
from functools import cache
from typing import Any, Protocol, runtime_checkable

from aggregator.strategies.base import (
    Average,
    ClientUpdate,
    ClusterModel,
    Event,
    Outcome,
    RoundPlan,
    Strategy,
    advanced,
)
from shoal import limits
from shoal.errors import ConfigError
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import STATISTICS_MODEL, STATISTICS_MODELS, Assignment, Phase, Share, statistics_model

STATISTICS_ASSIGNMENT = Assignment(
    Phase.STATISTICS, (STATISTICS_MODEL,), Share.TRAIN, train=True, evaluate=False, margins=False
)


@runtime_checkable
class Scaling(Protocol):
    """What a strategy has besides `Strategy` if its clusters are to have statistics of their own."""

    def scaling(self, state: Any) -> Mapping[int, tuple[int, tuple[str, ...]]]:
        """Return models that are in another model's scale until they have statistics: that model, and the devices to ask.

        Without devices a model is not to have any of its own yet.
        """

    def rescaled(self, state: Any, given: Mapping[int, list[ClientUpdate]]) -> Any:
        """Return the state after models have got statistics of their own, and the fleet under the id `STATISTICS_MODEL`.

        Args:
            state: the strategy's.
            given: the uploads of each model's devices: masked, how their statistics differ from those that it had before.
        """


@cache
def state_type(inner: Hashable) -> type[Any]:
    """Return the class of the states around those of class ``inner``.

    That state; the model of the fleet's statistics; those of single models, by id; and the devices of each mean of statistics.
    """
    fields: list[Any] = [
        ("inner", inner),
        ("slot", ClusterModel),
        ("own", Mapping[int, ClusterModel], field(default_factory=dict)),
        ("taken", tuple[tuple[str, ...], ...], ()),
    ]
    return dataclasses.make_dataclass("StandardisedState", fields, bases=(), frozen=True)


def shown_together(taken: Sequence[Collection[str]], devices: Iterable[str], least: int) -> tuple[str, ...]:
    """Return the devices of which a further mean may be shown, so that all means together tell of no fewer than ``least``.

    Devices that are in the same means can't be told apart by any sum or difference of these. So after the new mean no group of
    such devices may be smaller: a part of a group that is too small is left out, and of a group from which too few would stay
    behind some devices are left out to stay with them.

    Args:
        taken: the devices of each mean before.
        devices: those of the new one.
        least: fewest devices of a group.
    """
    groups: dict[tuple[int, ...], set[str]] = defaultdict(set)
    devices = set(devices)
    for device in devices.union(*taken):
        groups[tuple(i for i, mean in enumerate(taken) if device in mean)].add(device)
    shown: list[str] = []
    for signature, group in groups.items():
        inside = sorted(group & devices)
        behind = len(group) - len(inside)
        # Those that are in no mean at all are told by none.
        needed = max(0, least - behind) if behind and signature else 0
        inside = inside[: len(inside) - needed]
        shown += inside if len(inside) >= least else []
    return tuple(sorted(shown))


class Standardised:
    """A strategy with rounds of statistics before and among its own.

    Args:
        inner: the strategy, made for `RunPlan.without_statistics`.
        run: the whole plan.
        average: forms the mean of the statistics.
    """

    def __init__(self, inner: Strategy, run: RunPlan, average: Average) -> None:
        self.inner = inner
        self.run = run
        self.average = average
        self.name = inner.name
        self.settings_type = inner.settings_type
        inner_type: Any = inner.state_type
        self.state_type = state_type(inner_type)
        self.modes = inner.modes
        self._origin = run.origins - 1

    def init(self, devices: tuple[str, ...]) -> Any:
        """Return the state before round 1."""
        return self.state_type(self.inner.init(devices), ClusterModel(self._origin))

    def plan(self, state: Any, round_: int, available: tuple[str, ...]) -> tuple[Any, RoundPlan]:
        """Return the plan of a round of statistics, of the fleet or of clusters, or else the strategy's."""
        if state.slot.origin == self._origin:
            assignments = dict.fromkeys(available, STATISTICS_ASSIGNMENT)
            return state, RoundPlan(round_, {STATISTICS_MODEL: state.slot}, assignments)
        # Models learn at least as long in a new scale as in the one before.
        asked = self._asked(state, available) if 2 * round_ <= self.run.recipe.rounds else {}
        if asked:
            named = {order.candidates[-1] for order in asked.values()}
            models = {m: slot for m, slot in self.inner.models_of(state.inner).items() if m in named}
            return state, self._offering(RoundPlan(round_, models, asked), state)
        return self._around(state, *self.inner.plan(state.inner, round_, available))

    def _scaling(self, state: Any) -> Mapping[int, tuple[int, tuple[str, ...]]]:
        return self.inner.scaling(state.inner) if isinstance(self.inner, Scaling) else {}

    def _asked(self, state: Any, available: Collection[str]) -> dict[str, Assignment]:
        """Return the orders of the devices whose clusters are to have statistics, as far as those may be shown."""
        asked: dict[str, Assignment] = {}
        taken = list(state.taken)
        for model, (_, members) in sorted(self._scaling(state).items()):
            shown = shown_together(taken, set(members) & set(available), self.run.recipe.min_contributors)
            if shown and model not in state.own and model < limits.MAX_SCALED:
                # The model is named as well, so that devices make its newest state while they can.
                order = dataclasses.replace(STATISTICS_ASSIGNMENT, candidates=(statistics_model(model), model))
                asked |= dict.fromkeys(shown, order)
                taken.append(shown)
        return asked

    def _around(self, state: Any, after: Any, plan: RoundPlan) -> tuple[Any, RoundPlan]:
        other = plan.otherwise
        plan = dataclasses.replace(
            self._offering(plan, state), otherwise=other and self._around(state, other[0], other[1])
        )
        return dataclasses.replace(state, inner=after), plan

    def _offering(self, plan: RoundPlan, state: Any) -> RoundPlan:
        """Return a plan that offers the statistics too: the fleet's, and those in which its models are."""
        if STATISTICS_MODEL in plan.models:
            raise ConfigError(
                f"the strategy has used up its models: {STATISTICS_MODEL} is that of the statistics",
                hint="standardise locally, or run a smaller fleet",
            )
        own = self._statistics(state)
        offered = {statistics_model(model): own[model] for model in plan.models if model in own}
        return dataclasses.replace(plan, models={**plan.models, STATISTICS_MODEL: state.slot, **offered})

    def _statistics(self, state: Any) -> dict[int, ClusterModel]:
        """Return the statistics in which each model is, if they are not the fleet's."""
        waiting = {m: state.own.get(at, state.slot) for m, (at, _) in self._scaling(state).items()}
        return {**waiting, **state.own}

    def close(self, state: Any, plan: RoundPlan, given: list[ClientUpdate]) -> tuple[Any, Outcome]:
        """Move the models of the statistics by their means, if they are of enough devices; or close the strategy's round."""
        if STATISTICS_ASSIGNMENT.phase not in {order.phase for order in plan.assignments.values()}:
            models = {m: v for m, v in plan.models.items() if m not in STATISTICS_MODELS}
            inner, outcome = self.inner.close(state.inner, dataclasses.replace(plan, models=models), given)
            left = self.inner.models_of(inner)
            settled = {m for m, (_, devices) in self._scaling(state).items() if devices}.union(state.own)
            own = {m: v for m, v in self._statistics(state).items() if m in settled and m in left}
            return dataclasses.replace(state, inner=inner, own=own), outcome
        if state.slot.origin == self._origin:
            slot = advanced(state.slot, given, self.run, self.average, plan.round)
            state = dataclasses.replace(state, slot=slot, taken=(tuple(c.device for c in given),))
            state = state if slot.offset is None else self._rescaled(state, {STATISTICS_MODEL: given})
            return state, Outcome({}, (_event(plan.round, len(given)),))
        return self._close_clusters(state, plan, given)

    def _close_clusters(self, state: Any, plan: RoundPlan, given: list[ClientUpdate]) -> tuple[Any, Outcome]:
        own, taken, events = dict(state.own), list(state.taken), []
        moved: dict[int, list[ClientUpdate]] = {}
        before = self._statistics(state)
        for model in sorted(self._scaling(state)):
            if statistics_model(model) not in {o.candidates[0] for o in plan.assignments.values()}:
                continue
            mine = {c.device: c for c in given if c.model == statistics_model(model)}
            shown = shown_together(taken, mine, self.run.recipe.min_contributors)
            own[model] = before[model]
            if shown:
                moved[model] = [mine[d] for d in shown]
                own[model] = advanced(own[model], moved[model], self.run, self.average, plan.round)
                taken.append(shown)
            events.append(_event(plan.round, len(shown), cluster=model))
        state = dataclasses.replace(state, own=own, taken=tuple(taken))
        return self._rescaled(state, moved), Outcome({}, tuple(events))

    def _rescaled(self, state: Any, given: Mapping[int, list[ClientUpdate]]) -> Any:
        inner = self.inner.rescaled(state.inner, given) if isinstance(self.inner, Scaling) else state.inner
        return dataclasses.replace(state, inner=inner)

    def final(self, state: Any, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Return the wrapped strategy's final round, which offers the statistics too."""
        return self._offering(self.inner.final(state.inner, round_, devices), state)

    def models_of(self, state: Any) -> Mapping[int, ClusterModel]:
        """Return the wrapped strategy's models and those of the statistics."""
        own = {statistics_model(model): slot for model, slot in state.own.items()}
        return {**self.inner.models_of(state.inner), STATISTICS_MODEL: state.slot, **own}

    def retain(self, state: Any, active: frozenset[str]) -> Any:
        """Return the state without devices that are not ``active``."""
        return dataclasses.replace(state, inner=self.inner.retain(state.inner, active))


def _event(round_: int, devices: int, **more: int) -> Event:
    return Event(round_, "statistics", {**more, "devices": devices})
