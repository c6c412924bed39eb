"""Local training: the baseline of ifca section 6 in which each device is alone.

Each device has a `ClusterModel` of its own, which is moved by that device's updates only. These are means of one, so
``min_contributors`` must be 1, and every other device of the fleet could unmask them: such a run is for comparison, not for
devices that must not see each other's updates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from aggregator.strategies.base import (
    ClientUpdate,
    ClusterModel,
    Common,
    Outcome,
    RoundPlan,
    StrategySettings,
    evaluates,
    final_assignment,
    require,
    train_assignment,
)
from aggregator.strategies.drawing import drawn
from shoal import limits
from shoal.protocol.documents import RunPlan


@dataclass(frozen=True, slots=True)
class LocalSettings(StrategySettings):
    """Local training has none of its own: it is in the run plan."""


@dataclass(frozen=True, slots=True)
class LocalState:
    """One slot a device.

    Attributes:
        devices: in order of their names, then newcomers; the position is the model id.
        slots: in the same order.
        untrained: w_0, with which a newcomer starts; devices can name only states that a model of the run starts from.
    """

    devices: tuple[str, ...]
    slots: tuple[ClusterModel, ...]
    untrained: ClusterModel = field(default_factory=ClusterModel)


class Local(Common):
    """Local training; every device is a cluster of its own."""

    name = "local"
    settings_type = LocalSettings
    settings: LocalSettings
    state_type = LocalState

    def prepare(self) -> None:
        """Check the run and its settings, and make what follows from them."""
        require(
            self.run.recipe.min_contributors == 1,
            "local training gives each device its own model, but --min-contributors wants means of at least "
            f"{self.run.recipe.min_contributors}",
            "give --min-contributors 1; every device of the fleet can then unmask every other's model",
        )

    @staticmethod
    def models(_run: RunPlan) -> int:
        """Most models a run names at a time: one a device."""
        return limits.MAX_MODELS

    def init(self, devices: tuple[str, ...]) -> LocalState:
        """Return the state before round 1: every device at the origin."""
        return _with(LocalState((), ()), devices)

    def plan(self, state: LocalState, round_: int, available: tuple[str, ...]) -> tuple[LocalState, RoundPlan]:
        """Each of those drawn trains its own model."""
        state = _with(state, available)
        evaluate = evaluates(self.run, round_)
        place = {d: i for i, d in enumerate(state.devices)}
        models = {place[d]: state.slots[place[d]] for d in drawn(self.run, round_, available)}
        assignments = {state.devices[i]: train_assignment((i,), evaluate=evaluate) for i in models}
        return state, RoundPlan(round_, models, assignments)

    def close(self, state: LocalState, plan: RoundPlan, given: list[ClientUpdate]) -> tuple[LocalState, Outcome]:
        """Each slot moves by its own device's update."""
        slots = list(state.slots)
        for c in given:
            slots[c.model] = slots[c.model].moved(self.average([c], "uniform"), 1, plan.round)
        state = dataclasses.replace(state, slots=tuple(slots))
        return state, Outcome({d: i for i, d in enumerate(state.devices)})

    def final(self, state: LocalState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Every device takes its own model."""
        state = _with(state, devices)
        place = {d: i for i, d in enumerate(state.devices)}
        models = {place[d]: state.slots[place[d]] for d in devices}
        return RoundPlan(round_, models, {d: final_assignment((place[d],)) for d in devices}, final=True)

    def models_of(self, state: LocalState) -> Mapping[int, ClusterModel]:
        """Return every device's model."""
        return dict(enumerate(state.slots))

    def retain(self, state: LocalState, active: frozenset[str]) -> LocalState:  # noqa: ARG002
        """Return the state as it is: a model's id is its device's place, so the place of a revoked device stays."""
        return state


def _with(state: LocalState, devices: Iterable[str]) -> LocalState:
    """Return the state with slots for devices that it does not know, in order of their names."""
    new = tuple(sorted(set(devices) - set(state.devices)))
    slots = (*state.slots, *(state.untrained for _ in new))
    return dataclasses.replace(state, devices=(*state.devices, *new), slots=slots)
