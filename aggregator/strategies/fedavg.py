"""Federated averaging, and FedProx with a proximal term: fedgroup section II-A, Alg. 1 and Eq. 3.

One model for all devices. It moves by the weighted mean of the round's masked updates (line 8).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from aggregator.strategies.base import (
    ClientUpdate,
    ClusterModel,
    Common,
    Event,
    Outcome,
    Reads,
    RoundPlan,
    StrategySettings,
    advanced,
    capped_devices,
    evaluates,
    final_assignment,
    require_proximal,
    train_assignment,
)
from aggregator.strategies.discrepancy import discrepancy
from aggregator.strategies.drawing import drawn
from shoal.protocol.documents import RunPlan
from shoal.types import Float32Vector

MODEL = 0


@dataclass(frozen=True, slots=True)
class FedAvgSettings(StrategySettings):
    """FedAvg's own parameters; weighting, participation and local training are in the run plan.

    Attributes:
        discrepancy: report fedgroup Eq. 4 in every round.
    """

    discrepancy: bool = False

    @property
    def reads(self) -> Reads:
        """Means, and norms for the discrepancy."""
        return "norms" if self.discrepancy else "means"


@dataclass(frozen=True, slots=True)
class FedAvgState:
    """The model and the fleet's devices."""

    devices: tuple[str, ...]
    slot: ClusterModel = field(default_factory=ClusterModel)


class FedAvg(Common):
    """The baseline: one model for all.

    Attributes:
        proximal: whether devices must train with a proximal term.
    """

    name = "fedavg"
    proximal = False
    settings_type = FedAvgSettings
    settings: FedAvgSettings
    state_type = FedAvgState

    def prepare(self) -> None:
        """Check the run and its settings, and make what follows from them."""
        if self.proximal:
            require_proximal(self.run)

    @staticmethod
    def models(_run: RunPlan) -> int:
        """Most models a run names at a time."""
        return 1

    def init(self, devices: tuple[str, ...]) -> FedAvgState:
        """Return the state before round 1."""
        return FedAvgState(devices)

    def plan(self, state: FedAvgState, round_: int, available: tuple[str, ...]) -> tuple[FedAvgState, RoundPlan]:
        """Return the plan in which the drawn devices train the one model."""
        assignment = train_assignment((MODEL,), evaluate=evaluates(self.run, round_))
        return state, RoundPlan(
            round_, {MODEL: state.slot}, dict.fromkeys(drawn(self.run, round_, available), assignment)
        )

    def close(self, state: FedAvgState, plan: RoundPlan, given: list[ClientUpdate]) -> tuple[FedAvgState, Outcome]:
        """Move the model by the weighted mean update (line 8), if it is the mean of enough devices."""
        slot = advanced(state.slot, given, self.run, self.mean, plan.round)
        events: tuple[Event, ...] = ()
        if self.settings.discrepancy:
            events = discrepancy(given, {MODEL: state.slot}, {MODEL: slot}, plan.round)
        clusters = dict.fromkeys((*state.devices, *plan.assignments), MODEL)
        capped = (
            capped_devices([given], self.run.recipe.weighting, self.run.recipe.weight_cap)
            if slot is not state.slot
            else {}
        )
        return dataclasses.replace(state, slot=slot), Outcome(clusters, events, capped)

    def mean(self, contributions: list[ClientUpdate], weighting: str, cap: float = 0.0) -> Float32Vector:
        """Return the mean update (d,), float32, that moves the model; a subclass may take another mean (see `Average`)."""
        return self.average(contributions, weighting, cap)

    def final(self, state: FedAvgState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Every device takes the one model."""
        return RoundPlan(round_, {MODEL: state.slot}, {d: final_assignment((MODEL,)) for d in devices}, final=True)

    def models_of(self, state: FedAvgState) -> Mapping[int, ClusterModel]:
        """Return the one model."""
        return {MODEL: state.slot}

    def retain(self, state: FedAvgState, active: frozenset[str]) -> FedAvgState:
        """Return the state without devices that are not ``active``."""
        return dataclasses.replace(state, devices=tuple(d for d in state.devices if d in active))


class FedProx(FedAvg):
    """FedAvg of devices that are held close to the model they were sent: fedgroup section II-A, Eq. 3, on top of Alg. 1.

    Devices minimise F(w) + mu/2 |w - w_t|^2, where w_t is the model that the round began with. mu is ``prox_mu`` of the run's
    local training, which the device applies.
    """

    name = "fedprox"
    proximal = True
