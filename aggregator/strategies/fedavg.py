"""Federated averaging, and FedProx: FedGroup paper Alg. 1 and Eq. 3.

One model; its masked offset moves by the mean of the masked updates of those who took part. FedProx differs on the
device only: the proximal term mu/2 |w - w_t|^2 is part of the run plan's local settings.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from aggregator.numerics.backend import Backend
from aggregator.strategies.base import (
    Average,
    Contribution,
    Dump,
    Fetch,
    Gathered,
    Outcome,
    RoundPlan,
    Slot,
    drawn,
    evaluates,
    final_order,
    gather,
    in_order,
    mean_update,
    parse_settings,
    slot_dump,
    slot_load,
    train_order,
)
from wire.documents import RunPlan
from wire.types import Float32Vector

MODEL = 0


@dataclass(frozen=True, slots=True)
class FedAvgSettings:
    """FedAvg has none of its own: weighting, participation and local training are in the run plan."""


@dataclass(frozen=True, slots=True)
class FedAvgState:
    """The one model, who is in the fleet, and what the open round has brought so far."""

    devices: tuple[str, ...]
    slot: Slot = field(default_factory=Slot)
    gathered: Gathered = field(default_factory=dict)


class FedAvg:
    """The baseline: one model for all."""

    name = "fedavg"

    def __init__(self, run: RunPlan, _backend: Backend | None = None, average: Average = mean_update) -> None:
        self.run = run
        self.average = average
        self.settings: FedAvgSettings = parse_settings(FedAvgSettings, run)

    @staticmethod
    def models(_run: RunPlan) -> int:
        """Most models a run names at a time."""
        return 1

    def init(self, devices: tuple[str, ...]) -> FedAvgState:
        """Return the state before round 1."""
        return FedAvgState(devices)

    def plan(self, state: FedAvgState, round_: int, available: tuple[str, ...]) -> tuple[FedAvgState, RoundPlan]:
        """Everybody available trains the one model."""
        order = train_order((MODEL,), evaluate=evaluates(self.run, round_))
        return state, RoundPlan(round_, {MODEL: state.slot}, dict.fromkeys(drawn(self.run, round_, available), order))

    def absorb(self, state: FedAvgState, contribution: Contribution) -> FedAvgState:
        """Keep the contribution for `close`."""
        return dataclasses.replace(state, gathered=gather(state.gathered, contribution, self.run))

    def close(self, state: FedAvgState, plan: RoundPlan) -> tuple[FedAvgState, Outcome]:
        """Eq. 3: the offset moves by the weighted mean update, if enough devices stand behind it."""
        given = in_order(state.gathered.values())
        slot = state.slot
        if len(given) >= self.run.min_contributors:
            slot = slot.moved(self.average(given, self.run.weighting), len(given), plan.round)
        clusters = dict.fromkeys(state.devices, MODEL)
        return dataclasses.replace(state, slot=slot, gathered={}), Outcome(clusters)

    def final(self, state: FedAvgState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Every device takes the one model."""
        return RoundPlan(round_, {MODEL: state.slot}, {d: final_order((MODEL,)) for d in devices}, final=True)

    def dump(self, state: FedAvgState) -> Dump:
        """Return the state as the store keeps it."""
        vectors: dict[str, Float32Vector] = {}
        return Dump({"devices": list(state.devices), "slot": slot_dump("global", state.slot, vectors)}, vectors)

    def load(self, document: Mapping[str, Any], vectors: Mapping[str, Float32Vector], _fetch: Fetch) -> FedAvgState:
        """Return the state that `dump` described."""
        return FedAvgState(tuple(document["devices"]), slot_load(document["slot"], vectors))
