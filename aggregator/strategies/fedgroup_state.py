"""FedGroup's settings and state, and how the store keeps it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aggregator.strategies.base import Dump, Gathered, Slot, require, slot_dump, slot_load
from wire import limits
from wire.types import Float32Vector


@dataclass(frozen=True, slots=True)
class FedGroupSettings:
    """FedGroup's own parameters.

    Attributes:
        groups: m.
        alpha: the group cold start takes alpha * m devices, or all where there are fewer.
        measure: ``edc`` (Eq. 8) or ``madc`` (Eq. 7).
        start: where the groups' models start: at the ``mean`` of their devices' pre-trained models (Alg. 3, line 16),
            or at the ``origin`` (Alg. 2, line 2).
        rcc: ablation: the groups' directions are those of m cold devices drawn at random, no clustering.
        rac: ablation: devices that were not in the cold start come to a group at random.
        eta_g: inter-group learning rate (Alg. 2, line 18); 0 is off. Devices then report the length of their models.
        discrepancy: report Eq. 4 in every round.
    """

    groups: int = 3
    alpha: int = 20
    measure: str = "edc"
    start: str = "mean"
    rcc: bool = False
    rac: bool = False
    eta_g: float = 0.0
    discrepancy: bool = True

    def check(self) -> None:
        """Raise ConfigError for values that make no sense."""
        require(1 <= self.groups <= limits.MAX_MODELS - 2, f"groups is from 1 to {limits.MAX_MODELS - 2}")
        require(self.alpha >= 1, "alpha is at least 1")
        require(self.measure in ("edc", "madc"), f"measure {self.measure!r} is neither edc nor madc")
        require(0 <= self.eta_g <= 1, f"eta_g {self.eta_g:g} is not between 0 and 1")
        require(self.start in ("mean", "origin"), f"start {self.start!r} is neither mean nor origin")


@dataclass(frozen=True, slots=True)
class FedGroupState:
    """The groups, once the cold start has made them.

    Attributes:
        slots: the groups' models; directions: their Delta w_0, (d,) float32, which newcomers are compared with.
        since: round of the group cold start, 0 before.
        assignment: group of every device that has one.
        cohort: devices drawn for the round that waits for its newcomers' cold start; empty where none waits.
        lengths: with eta_g, the last known l2 norm of each group's model; 0 where unknown.
    """

    slots: tuple[Slot, ...] = ()
    directions: tuple[Float32Vector, ...] = ()
    since: int = 0
    assignment: Mapping[str, int] = field(default_factory=dict)
    cohort: tuple[str, ...] = ()
    lengths: tuple[float, ...] = ()
    gathered: Gathered = field(default_factory=dict)

    @property
    def auxiliary(self) -> Slot:
        """The auxiliary global model: the mean of the groups' models (fedgroup Alg. 2), the origin while there are none."""
        if not self.slots:
            return Slot()
        scale = sum(s.scale for s in self.slots) / len(self.slots)
        moved = [s for s in self.slots if s.offset is not None]
        if not moved:
            return Slot(scale=scale)
        total = np.zeros_like(moved[0].offset)
        for slot in moved:
            total += slot.offset
        total /= np.float32(len(self.slots))
        return Slot(0, total, min(s.contributors for s in moved), max(s.version for s in moved), scale)


def dump(state: FedGroupState) -> Dump:
    """Return the state as the store keeps it; the auxiliary model goes with it for whoever reads the store."""
    vectors: dict[str, Float32Vector] = {}
    directions = [f"direction-{j}-{state.since}" for j in range(len(state.directions))]
    document: dict[str, Any] = {
        "slots": [slot_dump(f"model-{j}", s, vectors) for j, s in enumerate(state.slots)],
        "auxiliary": slot_dump("auxiliary", state.auxiliary, vectors),
        "directions": directions,
        "since": state.since,
        "assignment": dict(state.assignment),
        "cohort": list(state.cohort),
        "lengths": list(state.lengths),
    }
    vectors |= dict(zip(directions, state.directions, strict=True))
    return Dump(document, vectors)


def load(document: Mapping[str, Any], vectors: Mapping[str, Float32Vector]) -> FedGroupState:
    """Return the state that `dump` described."""
    return FedGroupState(
        tuple(slot_load(s, vectors) for s in document["slots"]),
        tuple(vectors[name] for name in document["directions"]),
        document["since"],
        document["assignment"],
        tuple(document["cohort"]),
        tuple(document["lengths"]),
    )
