"""IFCA, the iterative federated clustering algorithm: Ghosh et al., Alg. 1 (conference) and Alg. 2 (extended).

Each device scores the k models on its own data, takes the one of least loss and trains it (extended, lines 6 to 11); the
server averages the updates of devices that chose the same (option I: gradients over all m machines, line 14; option II:
models, line 15). With a ``shared`` segment these coordinates are averaged over all participants and only the others are
clustered (section 4.3). Several random starts are run for a few rounds each and the one of least training loss is chosen, as
section 6 does for its synthetic data: starts that end with a merged or an empty cluster show a loss well above the others.

Beyond the paper: ``k = auto`` trains one model until groups are found that lower the devices' losses
(aggregator.strategies.grouping), and starts from theirs. A model that too few devices choose is retired or refilled.
Where a mean needs more than one device, the devices of one model after another take part under partial participation.

The mean of a model that too few devices choose can't be formed, so it would never change again. After `IDLE_ROUNDS` rounds it is
retired if the strategy has found k itself: devices choose among the others from then
on. If the owner has given k, it is refilled: it begins again from the cluster whose devices fit worst, as that cluster's model
plus the mean update of the worst half of them. With a ``min_contributors`` of 1, as in the paper, a given k is left alone.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.parted import wide_mean_of
from aggregator.numerics.robust import winsorised
from aggregator.strategies.base import (
    AUTO,
    Average,
    ClientUpdate,
    ClusterModel,
    Common,
    Event,
    Outcome,
    RoundPlan,
    capped_devices,
    evaluates,
    final_assignment,
    mean_loss,
    parse_settings,
    retained,
    train_assignment,
    weights_of,
)
from aggregator.strategies.drawing import drawn_in_turn
from aggregator.strategies.grouping.search import MOST_FOUND, Search, SearchState, retained_search
from aggregator.strategies.ifca.state import Broadcast, IfcaSettings, IfcaState, checked_settings
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import SHARED_MODEL
from shoal.types import Float32Vector

IDLE_ROUNDS: Final = 3
"""Rounds in a row with too few devices after which a model is retired or refilled."""

Step = tuple[IfcaState, tuple[Event, ...]]


def counted(state: IfcaState, least: int) -> IfcaState:
    """Return the state with one more round counted for each model that fewer than ``least`` devices chose last.

    Until all devices have chosen, nothing is counted: under partial participation the others may still choose it.
    """
    if any(device not in state.choice for device in state.devices):
        return dataclasses.replace(state, idle={})
    sizes = Counter(state.choice.values())
    live = [j for j in range(len(state.slots)) if j not in state.retired]
    idle = {j: state.idle.get(j, 0) + 1 for j in live if sizes[j] < least}
    return dataclasses.replace(state, idle=idle)


def retire(state: IfcaState, round_: int) -> Step:
    """Return the state without models that have been idle for too long, and an event for each; one model always stays."""
    events: list[Event] = []
    for j, rounds in sorted(state.idle.items()):
        if rounds < IDLE_ROUNDS or len(state.retired) == len(state.slots) - 1:
            continue
        left = {device: own for device, own in state.choice.items() if own != j}
        detail = {"model": state.first + j, "devices": len(state.choice) - len(left), "rounds": rounds}
        idle = {other: count for other, count in state.idle.items() if other != j}
        # All devices choose again before any is sent its own model alone.
        state = dataclasses.replace(state, choice=left, idle=idle, retired=state.retired | {j}, broadcast=Broadcast())
        events.append(Event(round_, "model-retired", detail))
    return state, tuple(events)


def refill(
    state: IfcaState,
    before: IfcaState,
    given: list[ClientUpdate],
    run: RunPlan,
    average: Average,
    weighting: str,
    round_: int,
) -> Step:
    """Return the state with the model refilled that has been idle longest, and an event; nothing if no cluster can spare devices.

    Args:
        state: after the round's means.
        before: the state in the round, from whose models the devices trained.
        given: the round's contributions.
        run: gives min_contributors and weight_cap.
        average: forms the mean update.
        weighting: of that mean.
        round_: the round's number.
    """
    waiting = [j for j, rounds in state.idle.items() if rounds >= IDLE_ROUNDS]
    least = max(1, run.recipe.min_contributors)
    chosen: dict[int, list[ClientUpdate]] = {}
    for c in given:
        chosen.setdefault(c.model - before.first, []).append(c)
    large = {j: found for j, found in chosen.items() if len(found) >= 2 * least}
    if not waiting or not large:
        return state, ()
    empty = max(waiting, key=lambda j: (state.idle[j], -j))
    worst = max(sorted(large), key=lambda j: float(winsorised(np.array([c.loss for c in large[j]])).mean()))
    half = sorted(large[worst], key=lambda c: (-c.loss, c.device))[: max(least, len(large[worst]) // 2)]
    half.sort(key=lambda c: c.device)
    slots = list(state.slots)
    slots[empty] = before.slots[worst].moved(average(half, weighting, run.recipe.weight_cap), len(half), round_)
    idle = {j: rounds for j, rounds in state.idle.items() if j != empty}
    detail = {"model": state.first + empty, "from": state.first + worst, "devices": len(half)}
    state = dataclasses.replace(state, slots=tuple(slots), idle=idle)
    return state, (Event(round_, "model-refilled", detail),)


STEADY_ROUNDS: Final = 3
"""Rounds in a row in which no device has chosen another model, after which clusters get statistics of their own."""


@dataclass(frozen=True, slots=True)
class _Mean:
    """A cluster's mean update, (d,) float32, and the contributions in it with their weights, (count,) float64."""

    update: Float32Vector
    given: list[ClientUpdate]
    weights: NDArray[np.float64]

    @property
    def count(self) -> int:
        """Devices in the mean."""
        return len(self.given)


class Ifca(Common):
    """IFCA on masked offsets."""

    name = "ifca"
    settings_type = IfcaSettings
    settings: IfcaSettings
    state_type = IfcaState

    def prepare(self) -> None:
        """Check the run and its settings, and make what follows from them."""
        s = checked_settings(self.run)
        by_option = "machines" if s.option == "gradient" else "cluster"
        self.normalise = by_option if s.normalise == "auto" else s.normalise
        self.weighting = "samples" if self.normalise == "samples" else "uniform"
        self.sharing = len(self.run.segments) > 1
        self.search = Search(self.run, self.backend, self.average, weighting=self.weighting, first_id=MOST_FOUND)

    @staticmethod
    def models(run: RunPlan) -> int:
        """Most models a run names at a time."""
        settings: IfcaSettings = parse_settings(IfcaSettings, run)
        return settings.k * settings.restarts or MOST_FOUND + Search.models()

    def init(self, devices: tuple[str, ...]) -> IfcaState:
        """Return the state before round 1: the first start, every model at its origin; the one model if k is to be found.

        Models of an earlier run are found already.
        """
        if self.settings.k == AUTO and self.run.origins == 1:
            return IfcaState(devices, (), settled=True, search=SearchState())
        slots, shared = self._origins(0)
        return IfcaState(devices, slots, shared, settled=self.settings.restarts == 1)

    def _origins(self, start: int) -> tuple[tuple[ClusterModel, ...], ClusterModel | None]:
        """Return a start's models; the shared segment is that of its first origin."""
        count = self.settings.k or self.run.origins
        slots = tuple(ClusterModel(origin=start * count + j) for j in range(count))
        return slots, slots[0] if self.sharing else None

    def plan(self, state: IfcaState, round_: int, available: tuple[str, ...]) -> tuple[IfcaState, RoundPlan]:
        """Return the plan in which drawn devices score all k models, or get only their own if identities are stable."""
        if state.search is not None:
            return self._with(state, available), self.search.plan(state.search, round_, available)
        models, s = state.offered, self.settings
        evaluate = evaluates(self.run, round_)
        chosen, asked = drawn_in_turn(self.run, round_, available, state.choice, state.asked)
        state = dataclasses.replace(state, asked=asked)
        assignments = dict.fromkeys(chosen, train_assignment(tuple(models), evaluate=evaluate))
        known: frozenset[str] = frozenset()
        if state.settled and state.broadcast.narrow(s.stable_rounds, s.probe_every):
            known = state.broadcast.confirmed
        if round_ <= state.kept_until:
            known = frozenset(state.choice)
        for device in assignments.keys() & known:
            assignments[device] = train_assignment((state.first + state.choice[device],), evaluate=evaluate)
        # Devices that follow their own model alone need the others for the next full broadcast.
        probes = state.settled and state.broadcast.probes_next(s.stable_rounds, s.probe_every)
        seal = frozenset(models) if probes or round_ == state.kept_until else frozenset[int]()
        return self._with(state, available), RoundPlan(round_, models, assignments, shared=state.shared, seal=seal)

    def _with(self, state: IfcaState, available: tuple[str, ...]) -> IfcaState:
        """Return the state with the devices that it does not know yet."""
        known = frozenset(state.devices)
        newcomers = tuple(d for d in available if d not in known)
        return dataclasses.replace(state, devices=(*state.devices, *newcomers)) if newcomers else state

    def close(self, state: IfcaState, plan: RoundPlan, given: list[ClientUpdate]) -> tuple[IfcaState, Outcome]:
        """Average within each cluster (an empty one does not change), then end a start after its last round."""
        if state.search is not None:
            steady = Broadcast(stable=STEADY_ROUNDS)
            state, outcome = self.search.settle(
                state,
                given,
                plan,
                lambda s, found: dataclasses.replace(s, slots=found.groups, choice=found.clusters, broadcast=steady),
            )
            clusters = {d: state.choice.get(d, 0) for d in state.devices}
            return state, dataclasses.replace(outcome, clusters=clusters)
        before, first = state, state.first
        broadcast, events = self._observed(state, plan, {c.device: c.model - first for c in given})
        slots, shared = self._averaged(state, given, plan.round)
        capped = self._capped(state, given)
        choice = {**state.choice, **{c.device: c.model - first for c in given}}
        state = dataclasses.replace(
            state,
            slots=slots,
            shared=shared,
            choice=choice,
            broadcast=broadcast,
            started=state.started + 1,
        )
        if not state.settled and state.started >= self.settings.restart_rounds:
            state, events = self._end_start(state, given, plan.round)
            state = dataclasses.replace(state, idle={})
        else:
            state, news = self._without_idle(state, before, given, plan.round)
            events += news
        # A start that has just ended has no choices any more.
        told, at = (state.choice, state.first) if state.settled else (choice, first)
        return state, Outcome({d: at + told.get(d, 0) for d in state.devices}, events, capped)

    def _without_idle(
        self, state: IfcaState, before: IfcaState, given: list[ClientUpdate], round_: int
    ) -> tuple[IfcaState, tuple[Event, ...]]:
        """Retire or refill models that too few devices have chosen for some rounds."""
        least = self.run.recipe.min_contributors
        if self.settings.k == AUTO:
            return retire(counted(state, max(1, least)), round_)
        if least <= 1 or self.sharing:
            return state, ()
        state = counted(state, least)
        return refill(state, before, given, self.run, self.average, self.weighting, round_)

    def _averaged(
        self, state: IfcaState, given: list[ClientUpdate], round_: int
    ) -> tuple[tuple[ClusterModel, ...], ClusterModel | None]:
        means: dict[int, _Mean] = {}
        least = self.run.recipe.min_contributors
        for j in state.offered:
            chosen = [c for c in given if c.model == j]
            if len(chosen) >= (1 if self.sharing else least):
                update = self.average(chosen, self.weighting, self.run.recipe.weight_cap)
                means[j] = _Mean(update, chosen, weights_of(chosen, self.weighting, self.run.recipe.weight_cap))
        among = {"machines": len(state.devices), "participants": len(given)}.get(self.normalise)
        span = self.run.span("cluster")
        slots = dict(enumerate(state.slots, state.first))
        for j, mean in means.items():
            if mean.count >= least:
                # A copy, since a view of the segment would hold the whole mean in memory.
                own = mean.update[span].copy() if self.sharing else mean.update
                slots[j] = slots[j].moved(_scaled(own, mean.count, among), mean.count, round_)
        shared = state.shared
        if shared is not None and len(given) >= least:
            shared = shared.moved(_scaled(self._shared_mean(given, means), len(given), among), len(given), round_)
        return tuple(slots.values()), shared

    def _shared_mean(self, given: list[ClientUpdate], means: Mapping[int, _Mean]) -> Float32Vector:
        """Return the mean update of the shared segment over all participants, capped by the median of all of them."""
        span, cap = self.run.span("shared"), self.run.recipe.weight_cap
        weights = dict(zip((c.device for c in given), weights_of(given, self.weighting, cap), strict=True))
        if any(weights[c.device] != w for m in means.values() for c, w in zip(m.given, m.weights, strict=True)):
            return self.average(given, self.weighting, cap)[span].copy()
        # Each update is read once: the mean over all is the weighted mean of the clusters' means.
        found: Float32Vector = wide_mean_of(
            [m.update[span] for m in means.values()], [m.weights.sum() for m in means.values()]
        )
        return found

    def _capped(self, state: IfcaState, given: list[ClientUpdate]) -> dict[str, float]:
        """Return the devices whose weight was capped; see `capped_devices`."""
        least = self.run.recipe.min_contributors
        means = [[c for c in given if c.model == j] for j in state.offered]
        means = [m for m in means if len(m) >= least]
        if self.sharing and len(given) >= least:
            means.insert(0, given)
        return capped_devices(means, self.weighting, self.run.recipe.weight_cap)

    def _observed(
        self, state: IfcaState, plan: RoundPlan, choice: Mapping[str, int]
    ) -> tuple[Broadcast, tuple[Event, ...]]:
        """Return the broadcast's state after the round's choices, and an event if it is narrowed or widened."""
        s, before = self.settings, state.broadcast
        if not state.settled:
            return before, ()
        asked = {d for d, a in plan.assignments.items() if len(a.candidates) == len(state.offered)}
        chosen = {d: j for d, j in choice.items() if d in asked}
        after = before.observed(chosen, state.choice, full=len(asked) == len(plan.assignments))
        if after.settled(s.stable_rounds) == before.settled(s.stable_rounds):
            return after, ()
        if after.settled(s.stable_rounds):
            return after, (Event(plan.round, "broadcast-narrowed", {"stable_rounds": after.stable}),)
        changed = sorted(d for d, j in chosen.items() if state.choice.get(d, j) != j)
        return after, (Event(plan.round, "broadcast-widened", {"changed": changed}),)

    def _end_start(
        self, state: IfcaState, given: list[ClientUpdate], round_: int
    ) -> tuple[IfcaState, tuple[Event, ...]]:
        loss = mean_loss(given, self.run)
        sizes = Counter(state.choice.values())
        detail = {"start": state.start, "loss": loss, "sizes": [sizes.get(j, 0) for j in range(self.settings.k)]}
        events = [Event(round_, "start-ended", detail)]
        better = loss is not None and (state.best_loss is None or loss < state.best_loss)
        if better or not state.best:
            state = dataclasses.replace(
                state,
                best=state.slots,
                best_shared=state.shared,
                best_start=state.start,
                best_loss=loss,
                best_choice=state.choice,
            )
        if state.start + 1 < self.settings.restarts:
            following = state.start + 1
            slots, shared = self._origins(following)
            first = following * self.settings.k
            state = dataclasses.replace(
                state, slots=slots, shared=shared, first=first, start=following, started=0, choice={}
            )
        else:
            events.append(Event(round_, "start-kept", {"start": state.best_start, "loss": state.best_loss}))
            state = state.settle()
        return state, tuple(events)

    def final(self, state: IfcaState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Every device takes the model of least loss on its own data: the paper's test protocol."""
        models = state.offered if state.search is None else {self.search.one: state.search.one}
        assignments = {d: final_assignment(tuple(models)) for d in devices}
        return RoundPlan(round_, models, assignments, final=True, shared=state.shared)

    def models_of(self, state: IfcaState) -> Mapping[int, ClusterModel]:
        """Return the models of the current start and of the best finished one, or those of the search for groups."""
        if state.search is not None:
            return self.search.models_of(state.search)
        models = dict(enumerate(state.best, state.best_start * len(state.best)))
        models |= dict(enumerate(state.slots, state.first))
        # The shared segment of a start that has just ended moved as that of the best start, if it is the best.
        ended = state.best_shared
        shared = ended if ended is not None and ended.offset is not None else state.shared
        return models if shared is None else {**models, SHARED_MODEL: shared}

    def scaling(self, state: IfcaState) -> dict[int, tuple[int, tuple[str, ...]]]:
        """Return the models and the devices that chose them, once choices are steady; see `Scaling`."""
        if state.search is not None or self.sharing or state.broadcast.stable < STEADY_ROUNDS:
            return {}
        return {m: (m, tuple(d for d, j in state.choice.items() if m == state.first + j)) for m in state.offered}

    def rescaled(self, state: IfcaState, given: Mapping[int, list[ClientUpdate]]) -> IfcaState:
        """Return the state in which devices keep their models as long again as these have trained in the scale before."""
        rounds = [c.round for m, rows in given.items() if m in state.offered for c in rows[:1]]
        return dataclasses.replace(state, kept_until=max([state.kept_until, *(2 * round_ for round_ in rounds)]))

    def retain(self, state: IfcaState, active: frozenset[str]) -> IfcaState:
        """Return the state without devices that are not ``active``: Alg. 1's m counts those that are."""
        return dataclasses.replace(
            state,
            devices=tuple(d for d in state.devices if d in active),
            choice=retained(state.choice, active),
            best_choice=retained(state.best_choice, active),
            search=retained_search(state.search, active),
            broadcast=dataclasses.replace(state.broadcast, confirmed=state.broadcast.confirmed & active),
        )


def _scaled(mean: Float32Vector, count: int, among: int | None) -> Float32Vector:
    """Return the sum of ``count`` updates, from their mean, divided by ``among``; the mean itself for None."""
    return mean if among in (None, count) else mean * np.float32(count / among)
