"""IFCA, the iterative federated clustering algorithm: Ghosh et al., Alg. 1 (conference) and Alg. 2 (extended).

Each device scores the k models on its own data, takes the one of least loss and trains it (line 7 and 8); the server
averages among those who chose the same (option I: gradients over all m machines, line 14; option II: models, line
16). Several random starts are run
for a few rounds each and the one of least training loss is kept, as section 6 does for its synthetic data: starts
that freeze with a merged or an empty cluster show a loss well above the others.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aggregator.numerics.backend import Backend
from aggregator.strategies.base import (
    Average,
    Contribution,
    Dump,
    Event,
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
    require,
    slot_dump,
    slot_load,
    train_order,
)
from wire.documents import RunPlan
from wire.types import Float32Vector


@dataclass(frozen=True, slots=True)
class IfcaSettings:
    """IFCA's own parameters.

    Attributes:
        k: clusters.
        option: ``model`` (II) or ``gradient`` (I: one full-batch step a round).
        normalise: who a cluster's sum is divided among: ``machines`` (all m), ``participants`` of the round,
            ``cluster`` (those who chose it), ``samples`` (weighted by n_i within the cluster); ``auto`` is the
            paper's: machines for I, cluster for II.
        restarts: random starts; restart_rounds: rounds each is given.
    """

    k: int = 2
    option: str = "model"
    normalise: str = "auto"
    restarts: int = 1
    restart_rounds: int = 10


@dataclass(frozen=True, slots=True)
class IfcaState:
    """The models of the start that is under way, and the best finished start.

    Attributes:
        slots: k slots; start: which random start they belong to; started: rounds it has had.
        best, best_loss: the finished start of least training loss; settled: whether it was chosen for good.
        choice: each device's last chosen cluster.
    """

    devices: tuple[str, ...]
    slots: tuple[Slot, ...]
    start: int = 0
    started: int = 0
    best: tuple[Slot, ...] = ()
    best_start: int = 0
    best_loss: float = float("inf")
    best_choice: Mapping[str, int] = field(default_factory=dict)
    settled: bool = False
    choice: Mapping[str, int] = field(default_factory=dict)
    gathered: Gathered = field(default_factory=dict)


class Ifca:
    """IFCA on masked offsets."""

    name = "ifca"

    def __init__(self, run: RunPlan, _backend: Backend | None = None, average: Average = mean_update) -> None:
        self.run = run
        self.average = average
        s: IfcaSettings = parse_settings(IfcaSettings, run)
        self.settings = s
        require(s.k >= 1 and s.restarts >= 1 and s.restart_rounds >= 1, "k, restarts and restart_rounds are at least 1")
        require(s.option in ("model", "gradient"), f"option {s.option!r} is neither model nor gradient")
        known = ("auto", "machines", "participants", "cluster", "samples")
        require(s.normalise in known, f"normalise {s.normalise!r} is none of {', '.join(known)}")
        require(
            s.option == "model" or (run.local.batch_size == 0 and run.local.steps == 1 and not run.local.momentum),
            "option gradient takes one full-batch step a round",
            "set batch_size 0, steps 1 and momentum 0, or option model",
        )
        require(
            run.origins == s.k * s.restarts,
            f"{s.restarts} starts of {s.k} models need {s.k * s.restarts} origins, the run ships {run.origins}",
        )
        require(
            s.restarts == 1 or s.restarts * s.restart_rounds < run.rounds,
            f"{s.restarts} starts of {s.restart_rounds} rounds leave none of {run.rounds} to the kept one",
            "raise rounds, or lower restarts or restart_rounds",
        )
        require(
            all(g.name == "cluster" for g in run.segments), "weight sharing by segments is not part of this version"
        )
        by_option = "machines" if s.option == "gradient" else "cluster"
        self.normalise = by_option if s.normalise == "auto" else s.normalise

    @staticmethod
    def models(run: RunPlan) -> int:
        """Most models a run names at a time."""
        settings: IfcaSettings = parse_settings(IfcaSettings, run)
        return settings.k * settings.restarts

    def init(self, devices: tuple[str, ...]) -> IfcaState:
        """Return the state before round 1: the first start, every model at its origin."""
        return IfcaState(devices, self._origins(0), settled=self.settings.restarts == 1)

    def _origins(self, start: int) -> tuple[Slot, ...]:
        return tuple(Slot(origin=start * self.settings.k + j) for j in range(self.settings.k))

    def _ids(self, state: IfcaState) -> tuple[int, ...]:
        first = state.slots[0].origin
        return tuple(range(first, first + self.settings.k))

    def plan(self, state: IfcaState, round_: int, available: tuple[str, ...]) -> tuple[IfcaState, RoundPlan]:
        """Everybody available scores all k models, takes the best and trains it. Model ids are origin numbers."""
        ids = self._ids(state)
        order = train_order(ids, evaluate=evaluates(self.run, round_))
        orders = dict.fromkeys(drawn(self.run, round_, available), order)
        return state, RoundPlan(round_, dict(zip(ids, state.slots, strict=True)), orders)

    def absorb(self, state: IfcaState, contribution: Contribution) -> IfcaState:
        """Keep the contribution for `close`."""
        return dataclasses.replace(state, gathered=gather(state.gathered, contribution, self.run))

    def close(self, state: IfcaState, plan: RoundPlan) -> tuple[IfcaState, Outcome]:
        """Average within each cluster (an empty one keeps its model), then end a start that has had its rounds."""
        given = in_order(state.gathered.values())
        ids = self._ids(state)
        slots = tuple(
            self._averaged(slot, [c for c in given if c.model == j], len(given), len(state.devices), plan.round)
            for j, slot in zip(ids, state.slots, strict=True)
        )
        choice = {**state.choice, **{c.device: c.model - ids[0] for c in given}}
        state = dataclasses.replace(state, slots=slots, choice=choice, gathered={}, started=state.started + 1)
        events: tuple[Event, ...] = ()
        if not state.settled and state.started >= self.settings.restart_rounds:
            state, events = self._end_start(state, given, plan.round)
        return state, Outcome({d: state.choice.get(d, 0) for d in state.devices}, events)

    def _averaged(self, slot: Slot, chosen: list[Contribution], participants: int, machines: int, round_: int) -> Slot:
        if len(chosen) < self.run.min_contributors:
            return slot
        mean = self.average(chosen, "samples" if self.normalise == "samples" else "uniform")
        among = {"machines": machines, "participants": participants}.get(self.normalise, len(chosen))
        if among != len(chosen):
            mean = mean * np.float32(len(chosen) / among)
        return slot.moved(mean, len(chosen), round_)

    def _end_start(
        self, state: IfcaState, given: list[Contribution], round_: int
    ) -> tuple[IfcaState, tuple[Event, ...]]:
        samples = sum(c.samples for c in given)
        loss = sum(c.loss * c.samples for c in given) / samples if samples else float("inf")
        sizes = Counter(state.choice.values())
        detail = {"start": state.start, "loss": loss, "sizes": [sizes.get(j, 0) for j in range(self.settings.k)]}
        events = [Event(round_, "start-ended", detail)]
        if loss < state.best_loss:
            state = dataclasses.replace(
                state, best=state.slots, best_start=state.start, best_loss=loss, best_choice=state.choice
            )
        if state.start + 1 < self.settings.restarts:
            following = state.start + 1
            state = dataclasses.replace(state, slots=self._origins(following), start=following, started=0, choice={})
        else:
            events.append(Event(round_, "start-kept", {"start": state.best_start, "loss": state.best_loss}))
            state = dataclasses.replace(
                state, slots=state.best, start=state.best_start, settled=True, choice=state.best_choice, best=()
            )
        return state, tuple(events)

    def final(self, state: IfcaState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Every device takes the model of least loss on its own data: the paper's test protocol."""
        ids = self._ids(state)
        models = dict(zip(ids, state.slots, strict=True))
        return RoundPlan(round_, models, {d: final_order(ids) for d in devices}, final=True)

    def dump(self, state: IfcaState) -> Dump:
        """Return the state as the store keeps it."""
        vectors: dict[str, Float32Vector] = {}
        document = {
            "devices": list(state.devices),
            "slots": [slot_dump(f"model-{s.origin}", s, vectors) for s in state.slots],
            "best": [slot_dump(f"model-{s.origin}", s, vectors) for s in state.best],
            "start": state.start,
            "started": state.started,
            "best_start": state.best_start,
            "best_loss": None if state.best_loss == float("inf") else state.best_loss,
            "best_choice": dict(state.best_choice),
            "settled": state.settled,
            "choice": dict(state.choice),
        }
        return Dump(document, vectors)

    def load(self, document: Mapping[str, Any], vectors: Mapping[str, Float32Vector], _fetch: Fetch) -> IfcaState:
        """Return the state that `dump` described."""
        best_loss = document["best_loss"]
        return IfcaState(
            tuple(document["devices"]),
            tuple(slot_load(s, vectors) for s in document["slots"]),
            document["start"],
            document["started"],
            tuple(slot_load(s, vectors) for s in document["best"]),
            document["best_start"],
            float("inf") if best_loss is None else best_loss,
            document["best_choice"],
            document["settled"],
            document["choice"],
        )
