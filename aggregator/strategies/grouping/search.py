"""Train one model for all devices until their updates form groups that pay.

All devices train one model, as in FedAvg. In its first, 5th, 15th, 30th, 60th ... round (`next_look`) all of them are asked, and
the cosines of their updates are divided into groups (`aggregator.numerics.silhouette`). Below `FLOOR` the silhouette says that
there are none, and nothing else happens: the look has cost no round. Otherwise groups of fewer than ``min_contributors`` devices
join the nearest one, and four rounds compare the two ways to go on:

1. all train the one model once more; it moves by the mean of all, and for each group a copy of it by the mean of that group;
2. each group trains its own model, which began as the model of the look plus the group's mean update;
3. and 4. devices report the loss of their group's model on their training share, then that of the copy.

Groups that gain enough (`GAIN`) are returned; else the one model goes on, has lost three rounds, and leaves out the
next look.

Devices keep states from which a model of the strategy's state starts. So a `Trial` names those that they will need two rounds
later: see ``begin``.

Decide between groups and one model by the devices' losses.

Devices that merely hold different labels form groups as well, and a model of theirs soon has the smaller loss: it learns how
common each label is. So the one model is not compared as it is. Both sides have had the same number of rounds, and the one
model's last step is that of the device's own group (`search`), which teaches it the same. What is left is what the group learned
before, apart from the others.

If groups have different data, all devices of a group gain about as much. If they only mix labels differently, each gains as its
own mix will have it. So the mean gain is measured in standard deviations within the groups, and each group has to reach `GAIN`.
Unlike a t value this does not grow with the number of devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np

from aggregator.numerics.backend import Backend, cosine_matrix
from aggregator.numerics.robust import FIGURE_STEP, inner, winsorised
from aggregator.numerics.silhouette import find_main_groups, join_small
from aggregator.strategies.base import (
    Average,
    ClientUpdate,
    ClusterModel,
    Event,
    Outcome,
    RoundPlan,
    capped_devices,
    evaluates,
    final_assignment,
    train_assignment,
)
from aggregator.strategies.drawing import drawn
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import Assignment, Phase, Share

GAIN: Final = 2.0
"""Least mean gain of a group, in standard deviations: about 98 % of normally distributed gains are above 0 then."""


def gain_of_groups(one: Mapping[str, float], own: Mapping[str, float], clusters: Mapping[str, int]) -> float | None:
    """Return the mean relative gain of the group that gains least, in standard deviations of the gains within groups.

    The relative gain of a device is 2 (one - own) / (one + own), between -2 and 2, so that devices with high losses do not
    outweigh others. Of a group of five or more the mean is trimmed, and the deviation that of Yuen's t for one device.

    Args:
        one: each device's loss with the one model.
        own: each device's loss with its group's model; devices that are not in both do not count.
        clusters: the group of each device.

    Returns:
        the gain; None if a group has no device that counts, or none has two.
    """
    figures: dict[int, list[tuple[float, float]]] = {group: [] for group in clusters.values()}
    for device in one.keys() & own.keys() & clusters.keys():
        total = one[device] + own[device]
        gain = (2.0 * (one[device] - own[device]) / total, 2.0 * FIGURE_STEP / total) if total > 0 else (0.0, 0.0)
        figures[clusters[device]].append(gain)
    if not all(figures.values()):
        return None
    least, floor, squares, freedom = math.inf, 0.0, 0.0, 0
    for group in figures.values():
        gains, steps = np.array(group).T
        kept, bounded = inner(gains), winsorised(gains)
        inside = int(kept.sum())
        least = min(least, float(gains[kept].mean()))
        floor = max(floor, float(winsorised(steps).max()))
        squares += float(np.square(bounded - bounded.mean()).sum()) * len(gains) / inside
        freedom += inside - 1
    if not freedom:
        return None
    spread = max(math.sqrt(squares / freedom), floor)
    return least / spread if spread > 0 else 0.0


MOST_FOUND: Final = 32
"""Most groups that a look finds."""
FLOOR: Final = 0.25
"""Least silhouette of groups: updates of devices alike reach about .2, those of groups .3 and more."""
LOOKS: Final = (1, 5, 15, 30)
"""Rounds of the one model in which updates are compared; each later look comes after twice as many rounds."""
TRIAL_ROUNDS: Final = 4
MOST_LOOKED: Final = 500
"""Most devices whose updates a look compares; the others join the group whose model fits them best."""


def next_look(last: int) -> int:
    """Return the round of the one model with the look that follows that in round ``last``."""
    return next((look for look in LOOKS if look > last), 2 * last)


@dataclass(frozen=True, slots=True)
class Trial:
    """Groups that are compared with the one model.

    Attributes:
        clusters: the group of each device of the look.
        groups: the groups' models.
        begin: a state from which devices will need to make another one, two rounds later: of the look's model for the groups'
            models, then of the one model for its copies.
        copies: the one model after a step of each group; none before the first round of the trial has closed.
        done: rounds of the trial that have closed.
        figures: of the partition, for the events.
        losses: each device's loss with its group's model.
        joined: devices whose own groups were too small; they have no say in the comparison.
        directions: the groups' models as they were after the look, if it was the first round of all.
    """

    clusters: Mapping[str, int]
    groups: tuple[ClusterModel, ...]
    begin: ClusterModel
    copies: tuple[ClusterModel, ...] = ()
    done: int = 0
    figures: Mapping[str, Any] = field(default_factory=dict)
    losses: Mapping[str, float] = field(default_factory=dict)
    joined: tuple[str, ...] = ()
    directions: tuple[ClusterModel, ...] = ()


@dataclass(frozen=True, slots=True)
class SearchState:
    """The one model, the trial of groups that is under way, and when the next look is due.

    Attributes:
        one: the model of all devices.
        trained: rounds that it was trained.
        look: the round of the one model in which updates are compared next; later if too few devices answer.
    """

    one: ClusterModel = field(default_factory=ClusterModel)
    trained: int = 0
    look: int = LOOKS[0]
    trial: Trial | None = None


@dataclass(frozen=True, slots=True)
class Found:
    """Groups that pay: their models, their devices, and their directions if they were found in the first round."""

    groups: tuple[ClusterModel, ...]
    clusters: Mapping[str, int]
    directions: tuple[ClusterModel, ...]


Step = tuple[SearchState, Found | None, tuple[Event, ...]]


class Search:
    """The search for groups.

    Args:
        run: the owner's plan.
        backend: computes cosines; numpy when absent.
        average: forms means of contributions.
        weighting: of the means: ``samples`` or ``uniform``.
        first_id: model id of the one model; its copies have the ids after it, and groups those from 0.
    """

    def __init__(
        self,
        run: RunPlan,
        backend: Backend | None,
        average: Average,
        *,
        weighting: str,
        first_id: int,
    ) -> None:
        self.run = run
        self.backend = backend
        self.average = average
        self.weighting = weighting
        self.one = first_id
        # A group of one device has no mean that hides it, and nothing to compare its gain with.
        self.least = max(2, run.recipe.min_contributors)

    @staticmethod
    def models() -> int:
        """Most ids that the search takes from ``first_id`` on."""
        return MOST_FOUND + 1

    def plan(self, state: SearchState, round_: int, available: tuple[str, ...]) -> RoundPlan:
        """Return the plan of the next round: training of the one model, a look, or a round of a trial."""
        if state.trial is not None:
            return self._trial_plan(state, state.trial, round_, available)
        looking = self._looks(state, round_)
        first = looking and not state.trained and self.run.capabilities.pretrain
        phase = Phase.PRETRAIN if first else Phase.TRAIN
        assignment = train_assignment((self.one,), evaluate=evaluates(self.run, round_), phase=phase)
        chosen = self._all(round_, available) if looking else drawn(self.run, round_, available)
        return RoundPlan(round_, {self.one: state.one}, dict.fromkeys(chosen, assignment))

    def _looks(self, state: SearchState, round_: int) -> bool:
        return state.trained + 1 >= state.look and round_ + TRIAL_ROUNDS < self.run.recipe.rounds

    def _all(self, round_: int, available: tuple[str, ...]) -> tuple[str, ...]:
        if len(available) <= MOST_LOOKED:
            return available
        # The 2 makes this another stream than those of other draws by seed and round.
        chosen = np.random.default_rng([self.run.seed, round_, 2]).choice(len(available), MOST_LOOKED, replace=False)
        return tuple(available[i] for i in sorted(chosen))

    def _trial_plan(self, state: SearchState, trial: Trial, round_: int, available: tuple[str, ...]) -> RoundPlan:
        there = [d for d in available if d in trial.clusters]
        if trial.done == 0:
            assignment = train_assignment((self.one,), evaluate=evaluates(self.run, round_))
            return RoundPlan(round_, {self.one: state.one}, dict.fromkeys(there, assignment))
        copied = trial.done == TRIAL_ROUNDS - 1
        first, models = (self.one + 1, trial.copies) if copied else (0, trial.groups)
        make = train_assignment if trial.done == 1 else _score_assignment
        assignments = {d: make((first + trial.clusters[d],), evaluate=False) for d in there}
        return RoundPlan(round_, {first + j: model for j, model in enumerate(models)}, assignments)

    def close(self, state: SearchState, given: list[ClientUpdate], round_: int) -> Step:
        """Return the state after a round, the groups if they are found, and events.

        Args:
            state: before.
            given: the round's contributions, in order of device id.
            round_: its number.
        """
        if state.trial is not None:
            return self._continue_trial(state, state.trial, given, round_)
        moved = self._moved(state.one, given, round_)
        if moved is state.one:
            return state, None, ()
        looking = self._looks(state, round_)
        after = dataclasses.replace(state, one=moved, trained=state.trained + 1)
        if not looking or len(given) < 2 * self.least:
            return after, None, ()
        after = dataclasses.replace(after, look=next_look(state.look))
        similarity = cosine_matrix([c.row for c in given], backend=self.backend)
        partition = find_main_groups(similarity, MOST_FOUND, self.least, FLOOR)
        sizes = partition.sizes
        figures = {
            "k": len(sizes),
            "silhouette": round(partition.silhouette, 3),
            "sizes": sorted(sizes, reverse=True),
        }
        labels = join_small(similarity, partition.labels, self.least)
        if not labels.any():
            return after, None, (Event(round_, "one-group", figures),)
        members = [[c for c, label in zip(given, labels, strict=True) if label == j] for j in range(labels.max() + 1)]
        groups = tuple(self._moved(state.one, mine, round_) for mine in members)
        trial = Trial(
            clusters={c.device: int(label) for c, label in zip(given, labels, strict=True)},
            groups=groups,
            begin=state.one,
            figures={**figures, "models": len(groups)},
            joined=tuple(
                c.device for c, group in zip(given, partition.labels, strict=True) if sizes[group] < self.least
            ),
            directions=() if state.trained else groups,
        )
        return dataclasses.replace(after, trial=trial), None, (Event(round_, "groups-tried", trial.figures),)

    def _continue_trial(self, state: SearchState, trial: Trial, given: list[ClientUpdate], round_: int) -> Step:
        members = [[c for c in given if trial.clusters.get(c.device) == j] for j in range(len(trial.groups))]
        if trial.done < 2 and min(map(len, members)) < self.least:
            return self._end(state, trial, {"reason": "devices absent"}, round_)
        after = dataclasses.replace(trial, done=trial.done + 1)
        if trial.done == 0:
            # The devices need the one model as it was for two more rounds.
            copies = tuple(self._moved(state.one, mine, round_) for mine in members)
            after = dataclasses.replace(after, copies=copies, begin=state.one)
            moved = self._moved(state.one, given, round_)
            return dataclasses.replace(state, one=moved, trained=state.trained + 1, trial=after), None, ()
        if trial.done == 1:
            groups = tuple(self._moved(g, mine, round_) for g, mine in zip(trial.groups, members, strict=True))
            after = dataclasses.replace(after, groups=groups)
        losses = {c.device: c.loss for c in given}
        if trial.done == 2:
            after = dataclasses.replace(after, losses=losses)
        if after.done < TRIAL_ROUNDS:
            return dataclasses.replace(state, trial=after), None, ()
        judges = {d: j for d, j in trial.clusters.items() if d not in trial.joined} or trial.clusters
        gain = gain_of_groups(losses, trial.losses, judges)
        if gain is None:
            return self._end(state, trial, {"reason": "devices absent"}, round_)
        if gain < GAIN:
            return self._end(state, trial, {"gain": round(gain, 2), "needed": GAIN}, round_)
        event = Event(round_, "groups-found", {**trial.figures, "gain": round(gain, 2)})
        found = Found(trial.groups, trial.clusters, trial.directions)
        return dataclasses.replace(state, trial=None), found, (event,)

    def _end(self, state: SearchState, trial: Trial, detail: Mapping[str, Any], round_: int) -> Step:
        """Go on with one model."""
        event = Event(round_, "groups-refused", {**trial.figures, **detail})
        return dataclasses.replace(state, trial=None, look=next_look(state.look)), None, (event,)

    def _moved(self, model: ClusterModel, given: list[ClientUpdate], round_: int) -> ClusterModel:
        """Return the model plus the mean update; the model itself if they are too few for a mean."""
        if len(given) < max(1, self.run.recipe.min_contributors):
            return model
        return model.moved(self.average(given, self.weighting, self.run.recipe.weight_cap), len(given), round_)

    def settle(
        self, state: Any, given: list[ClientUpdate], plan: RoundPlan, grouped: Callable[[Any, Found], Any]
    ) -> tuple[Any, Outcome]:
        """Return the state of a strategy after a round of its ``search``, and the outcome.

        Args:
            state: the strategy's, with the fleet's ``devices``.
            given: the round's contributions, in order of device id.
            plan: of the round.
            grouped: returns the strategy's state with the groups that were found.
        """
        after, found, events = self.close(state.search, given, plan.round)
        capped = capped_devices(self.means(state.search, given), self.weighting, self.run.recipe.weight_cap)
        if found is None:
            clusters = dict.fromkeys((*state.devices, *plan.assignments), 0)
            return dataclasses.replace(state, search=after), Outcome(clusters, events, capped)
        return dataclasses.replace(grouped(state, found), search=None), Outcome(found.clusters, events, capped)

    def final(self, state: SearchState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Return the final round of a run that has found no groups: all take the one model."""
        assignments = dict.fromkeys(devices, final_assignment((self.one,)))
        return RoundPlan(round_, {self.one: state.one}, assignments, final=True)

    def means(self, state: SearchState, given: list[ClientUpdate]) -> list[list[ClientUpdate]]:
        """Return the contributions of each mean that a model moved by in the round that follows ``state``."""
        trained = [c for c in given if c.vector is not None]
        if state.trial is None or state.trial.done == 0:
            return [trained]
        return [[c for c in trained if c.model == j] for j in range(len(state.trial.groups))]

    def models_of(self, state: SearchState) -> dict[int, ClusterModel]:
        """Return all models of the search by id: the one model, its copies, and the groups'."""
        found = {self.one: state.one}
        if state.trial is not None:
            found |= dict(enumerate(state.trial.groups))
            found |= {self.one + 1 + j: model for j, model in enumerate(state.trial.copies)}
        return found


def retained_search(state: SearchState | None, active: frozenset[str]) -> SearchState | None:
    """Return the state without devices that are not ``active``."""
    if state is None or state.trial is None:
        return state
    clusters = {d: j for d, j in state.trial.clusters.items() if d in active}
    return dataclasses.replace(state, trial=dataclasses.replace(state.trial, clusters=clusters))


def _score_assignment(candidates: tuple[int, ...], *, evaluate: bool) -> Assignment:
    return Assignment(Phase.SCORE, candidates, Share.TRAIN, train=False, evaluate=evaluate, margins=False)
