"""A round of statistics before the first round of any strategy, for tasks that standardise with the fleet's figures.

`Standardised` wraps a strategy. One more model, `STATISTICS_MODEL`, starts from the zero vector that the owner seals as the
last origin. In the first round all available devices add their statistics to it instead of an update: masked like one, so the
aggregator sees neither a device's figures nor their mean. Once the mean of at least ``min_contributors`` devices has moved that
model, the wrapped strategy plans every round, and each round offers the model too, so that devices which come later get it as
they get every other model.

Rules:

- The wrapped strategy sees the plan without the extra origin, model and setting, and no statistics.
- A round of too few statistics is repeated; it counts among the plan's rounds.
- If devices lose the model (`aggregator.rounds.opening`), it is rolled back to its checkpoint, or to zero and is made again.

Example: FedAvg of three devices plans statistics for round 1 and, after their mean, training for round 2.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from functools import cache
from typing import Any

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
from shoal.errors import ConfigError
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import STATISTICS_MODEL, Assignment, Phase, Share

STATISTICS_ASSIGNMENT = Assignment(
    Phase.STATISTICS, (STATISTICS_MODEL,), Share.TRAIN, train=True, evaluate=False, margins=False
)


@cache
def state_type(inner: Hashable) -> type[Any]:
    """Return the class of the states around those of class ``inner``: that, the model of the statistics, and the open round's."""
    fields: list[Any] = [
        ("inner", inner),
        ("slot", ClusterModel),
    ]
    return dataclasses.make_dataclass("StandardisedState", fields, bases=(), frozen=True)


class Standardised:
    """A strategy with a round of statistics before it.

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
        """Return the plan of a round of statistics until their mean is there, then the wrapped strategy's."""
        if state.slot.origin == self._origin:
            assignments = dict.fromkeys(available, STATISTICS_ASSIGNMENT)
            return state, RoundPlan(round_, {STATISTICS_MODEL: state.slot}, assignments)
        return self._around(state, *self.inner.plan(state.inner, round_, available))

    def _around(self, state: Any, after: Any, plan: RoundPlan) -> tuple[Any, RoundPlan]:
        other = plan.otherwise
        plan = dataclasses.replace(
            self._offering(plan, state.slot), otherwise=other and self._around(state, other[0], other[1])
        )
        return dataclasses.replace(state, inner=after), plan

    @staticmethod
    def _offering(plan: RoundPlan, slot: ClusterModel) -> RoundPlan:
        if STATISTICS_MODEL in plan.models:
            raise ConfigError(
                f"the strategy has used up its models: {STATISTICS_MODEL} is that of the statistics",
                hint="standardise locally, or run a smaller fleet",
            )
        return dataclasses.replace(plan, models={**plan.models, STATISTICS_MODEL: slot})

    def close(self, state: Any, plan: RoundPlan, given: list[ClientUpdate]) -> tuple[Any, Outcome]:
        """Move the model by the mean of the statistics, if they are of enough devices; or close the strategy's round."""
        if STATISTICS_ASSIGNMENT.phase in {order.phase for order in plan.assignments.values()}:
            slot = advanced(state.slot, given, self.run, self.average, plan.round)
            state = dataclasses.replace(state, slot=slot)
            return state, Outcome({}, (Event(plan.round, "statistics", {"devices": len(given)}),))
        plan = dataclasses.replace(plan, models={m: v for m, v in plan.models.items() if m != STATISTICS_MODEL})
        inner, outcome = self.inner.close(state.inner, plan, given)
        return dataclasses.replace(state, inner=inner), outcome

    def final(self, state: Any, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Return the wrapped strategy's final round, which offers the statistics too."""
        return self._offering(self.inner.final(state.inner, round_, devices), state.slot)

    def models_of(self, state: Any) -> Mapping[int, ClusterModel]:
        """Return the wrapped strategy's models and that of the statistics."""
        return {**self.inner.models_of(state.inner), STATISTICS_MODEL: state.slot}

    def retain(self, state: Any, active: frozenset[str]) -> Any:
        """Return the state without devices that are not ``active``."""
        return dataclasses.replace(state, inner=self.inner.retain(state.inner, active))
