"""FedGroup, and FedGrouProx with a proximal term: Duan et al., Algs 2 and 3, with Eqs 3 to 9.

Group cold start (Alg. 3): alpha * m devices, drawn at random, pre-train from the origin by the plan's ``pretrain``
recipe; their updates are clustered by EDC (Eq. 8) or MADC (Eq. 7), and the mean of a group's updates is its direction. Line
16 calls that mean the group's model and leaves w_0 out; a model is origin + mean here (``start = mean``), or the origin, as
Alg. 2 has it (``start = origin``). RCC draws the directions from the updates instead.

Training (Alg. 2): a cohort is drawn. Devices in it that belong to no group are placed first, in a round of their own. Then the
whole cohort trains, each device its group's model, and every group runs FedAvg by itself (lines 5 to 7); the model of an
empty group does not change (line 12). Inter-group aggregation (lines 16 to 19) is off unless ``eta_g`` is
set. The auxiliary global model is the mean of the groups'; a device that never joined a group ends with it.

Placement (Eq. 9): a newcomer pre-trains from w_0 and joins the group whose direction has the highest cosine with its update.
The aggregator can't compare vectors that were masked under different keys, so the newcomer does. A direction is the difference
of two models that devices hold, w_0 and w_0 plus the direction, and devices keep both for newcomers. If no device can hand
them over, or the newcomer does not answer, it chooses by loss instead: it scores the groups' models and trains the best with
the rest of the cohort. So do all newcomers if a group has no direction: fewer than ``min_contributors`` devices were in its
mean. RAC sends newcomers to a group at random.

Beyond the paper: ``groups = auto`` finds the number of groups and repeats the cold start until they are clear
(aggregator.strategies.grouping). A group of fewer than ``min_contributors`` cold devices joins the one of the nearest direction,
since its model could not move. Where a mean needs more than one device, groups take turns under partial participation.

Inter-group aggregation (Alg. 2, lines 16 to 19): each group's model w_j becomes w_j + eta_g sum over l != j of w_l / |w_l|:
whole models, not offsets. With w_j = a_j origin + unmask(O_j) the sum is taken on the scales a_j and on the masked offsets O_j
by themselves, so the aggregator needs no origin, only the lengths |w_l|, which masks and origins hide from it. Devices report
the length of the model that they have trained, |w_l + delta_i|. With weights p_i, and since the mean of squares is the square
of the mean and the variance,

    |w_l + mean delta|^2 = sum p_i |w_l + delta_i|^2 - sum p_i |delta_i|^2 + |mean delta|^2

which is exactly the length after the intra-group update. A group that did not move this round counts with its last known
length (inter-group aggregation may have changed it since), and not at all without one.

Devices may report false lengths. All devices of a group start from one model, so a true length differs from the model's by no
more than the device's own update is long: the medians of these bounds limit every report, and change no true one while most
are true. A group of absurd length adds nothing to the others' models. A length near zero gives its group a huge share of them.
If a resulting model is one that devices would refuse (`fits`), no group is changed by inter-group aggregation in this round.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.backend import Backend, cosine_from_gram, cosine_matrix, products
from aggregator.numerics.clustering import complete_linkage, kmeans
from aggregator.numerics.embedding import edc, edc_from_gram, madc
from aggregator.numerics.silhouette import join_small
from aggregator.strategies.base import (
    AUTO,
    ClientUpdate,
    ClusterModel,
    Common,
    Event,
    Outcome,
    RoundPlan,
    advanced,
    capped_devices,
    evaluates,
    final_assignment,
    norm_of,
    parse_settings,
    place_assignment,
    require,
    require_one_segment,
    require_proximal,
    retained,
    starts_of,
    train_assignment,
    weights_of,
)
from aggregator.strategies.discrepancy import discrepancy
from aggregator.strategies.drawing import drawn_in_turn
from aggregator.strategies.fedgroup.state import FedGroupSettings, FedGroupState
from aggregator.strategies.grouping.search import Search, SearchState, retained_search
from shoal.errors import IntegrityError
from shoal.limits import MAX_SCALE, MIN_WEIGHT
from shoal.protocol.cells import Partition
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import Assignment, Phase
from shoal.types import Float32Vector


def length_after(
    given: list[ClientUpdate], before: ClusterModel, after: ClusterModel, weighting: str, cap: float = 0.0
) -> float:
    """Return the l2 norm of a group's model after its intra-group update.

    Args:
        given: the updates whose mean moved ``before`` to ``after``, each with ``model_norm``.
        before: the group's slot when the round began.
        after: the same, moved.
        weighting: samples or uniform, as the mean was weighted.
        cap: the weight cap of that mean.

    Raises:
        IntegrityError: a contribution lacks the norm of the trained model.
    """
    missing = [c.device for c in given if not c.model_norm]
    if missing:
        raise IntegrityError(f"{missing[0]} did not report the norm of its model, which eta_g needs")
    weights = weights_of(given, weighting, cap)
    lengths, norms = np.array([c.model_norm for c in given]), np.array([c.norm for c in given])
    lengths = np.clip(lengths, np.median(lengths - norms) - norms, np.median(lengths + norms) + norms)
    squares = lengths**2 - norms**2
    assert after.offset is not None
    step = norm_of(after.offset if before.offset is None else after.offset - before.offset)
    return math.sqrt(max(float(np.average(squares, weights=weights)) + step**2, 0.0))


def aggregate(
    slots: tuple[ClusterModel, ...], lengths: tuple[float, ...], eta: float, round_: int
) -> tuple[ClusterModel, ...]:
    """Return the groups' models after inter-group aggregation.

    Args:
        slots: after the intra-group update.
        lengths: the models' l2 norms; 0 where unknown: such a group adds to no other.
        eta: eta_g.
        round_: becomes the slots' version.
    """
    return tuple(_plus_others(slots, lengths, j, eta, round_) for j in range(len(slots)))


def fits(slot: ClusterModel, longest: float) -> bool:
    """Whether devices take such a model: its weights in bounds, its offset finite and not longer than ``longest``."""
    return slot.scale + sum(weight for weight, _ in slot.others) <= MAX_SCALE and slot.norm <= longest


def _plus_others(
    slots: tuple[ClusterModel, ...], lengths: tuple[float, ...], j: int, eta: float, round_: int
) -> ClusterModel:
    own = slots[j]
    # A recipe can't have a smaller weight, and it would change nothing: the length is false or absurd.
    lengths = tuple(length if length and eta / length >= MIN_WEIGHT else 0.0 for length in lengths)
    others = [(s, eta / length) for i, (s, length) in enumerate(zip(slots, lengths, strict=True)) if i != j and length]
    if not others:
        return own
    starts = starts_of([(1.0, own), *((share, s) for s, share in others)])
    scale = starts.pop(own.origin)
    moved = dataclasses.replace(
        own, scale=scale, others=tuple((weight, number) for number, weight in starts.items()), version=round_
    )
    extra: Float32Vector | None = None
    for s, share in others:
        if s.offset is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # a length near 0 may overflow: `fits` checks
                piece = s.offset * np.float32(share)
                extra = piece if extra is None else extra + piece
    if extra is None:
        return moved
    with np.errstate(over="ignore", invalid="ignore"):
        return moved.moved(extra, min(s.contributors for s, _ in others if s.offset is not None), round_)


FEWEST_FOR_MADC = 3
"""Eq. 7 divides by n - 2."""


def fewest_updates(groups: int, measure: str) -> int:
    """Return how many pre-training updates the measure needs to tell ``groups`` groups apart."""
    return max(groups, 2, FEWEST_FOR_MADC if measure == "madc" else 0)


def group_updates(
    rows: list[Float32Vector], groups: int, measure: str, seed: int, backend: Backend | None = None
) -> NDArray[np.intp]:
    """Return the group of every pre-training update (fedgroup Alg. 3, lines 7 to 14).

    Args:
        rows: n updates (d,), float32, masked or not; at least `fewest_updates` of them.
        groups: m.
        measure: ``edc``: k-means++ on the cosines to the m top singular directions (Eq. 8); ``madc``: complete linkage
            on the mean absolute differences of cosines (Eq. 7).
        seed: of k-means.
        backend: computes dot products and distances; numpy when absent.

    Returns:
        shape (n,), intp, numbered by first appearance; fewer than m numbers where there are fewer different updates.
    """
    if measure == "madc":
        return complete_linkage(madc(cosine_matrix(rows, backend=backend), backend=backend), groups)
    return kmeans(edc(rows, groups, backend=backend), groups, seed)


def group_gram(gram: NDArray[np.float64], groups: int, measure: str, seed: int) -> NDArray[np.intp]:
    """Return `group_updates` of the updates with the dot products ``gram``, (n, n) float64."""
    if measure == "madc":
        return complete_linkage(madc(cosine_from_gram(gram)), groups)
    return kmeans(edc_from_gram(gram, groups), groups, seed)


def random_centres(rows: list[Float32Vector], groups: int, seed: int) -> list[int]:
    """Return the places of ``groups`` different updates drawn as centres: the ablation RCC of fedgroup section IV-B."""
    return sorted(np.random.default_rng([seed, groups]).choice(len(rows), groups, replace=False).tolist())


def nearest_directions(
    rows: list[Float32Vector], directions: list[Float32Vector], backend: Backend | None = None
) -> list[int]:
    """Return for every update the direction of highest cosine (fedgroup Eq. 9, for both measures of the cold start).

    Args:
        rows: n updates (d,), float32.
        directions: the groups' (d,), float32, under the same mask.
        backend: computes dot products; numpy when absent.

    Returns:
        n places in ``directions``; the first of equals.
    """
    found = products(rows, directions, backend=backend)
    lengths = np.array([norm_of(v) for v in directions])
    # The update's own length is common to all its cosines.
    cosines = np.divide(found, lengths, out=np.zeros_like(found), where=lengths > 0)
    return [int(j) for j in cosines.argmax(axis=1)]


Step = tuple[FedGroupState, tuple[Event, ...]]


class FedGroup(Common):
    """FedGroup on masked offsets.

    Attributes:
        auxiliary, untrained: model ids of the auxiliary global model and of the origin; groups have 0 to m - 1, and the models
            of their directions the ids after ``untrained``.
        proximal: whether devices must train with a proximal term.
    """

    name = "fedgroup"
    proximal = False
    settings_type = FedGroupSettings
    settings: FedGroupSettings
    state_type = FedGroupState

    def prepare(self) -> None:
        """Check the run and its settings, and make what follows from them."""
        self.settings.check()
        if self.proximal:
            require_proximal(self.run)
        require(self.run.recipe.rounds > 1, f"{self.name} takes a round of its own before the first one of training")
        require_one_segment(self.run)
        most = self.settings.most_groups
        self.auxiliary = most
        self.untrained = most + 1
        weighting = self.run.recipe.weighting
        self.search = Search(self.run, self.backend, self.average, weighting=weighting, first_id=2 * most + 2)

    @staticmethod
    def models(run: RunPlan) -> int:
        """Most models a run names at a time: the groups' and those of their directions, the auxiliary one, the origin."""
        settings: FedGroupSettings = parse_settings(FedGroupSettings, run)
        return 2 * settings.most_groups + 2 + (Search.models() if settings.groups == AUTO else 0)

    @staticmethod
    def partitions(run: RunPlan, gram: NDArray[np.float64]) -> tuple[Partition, ...]:
        """Return the groups of a cold start by the products of its updates, (n, n) float64; none if they are too few."""
        s: FedGroupSettings = parse_settings(FedGroupSettings, run)
        if len(gram) < fewest_updates(s.groups, s.measure):
            return ()
        labels = group_gram(gram, s.groups, s.measure, run.seed)
        return (Partition(bytes(join_small(cosine_from_gram(gram), labels, run.recipe.min_contributors).tolist())),)

    def init(self, devices: tuple[str, ...]) -> FedGroupState:
        """Return the state before round 1: no groups yet, or those of an earlier run, which devices join as newcomers by loss."""
        if self.run.origins > 1:
            slots = tuple(ClusterModel(origin) for origin in range(self.run.origins))
            return FedGroupState(slots=slots, lengths=(0.0,) * len(slots), devices=devices)
        return FedGroupState(devices=devices, search=SearchState() if self.settings.groups == AUTO else None)

    def plan(self, state: FedGroupState, round_: int, available: tuple[str, ...]) -> tuple[FedGroupState, RoundPlan]:
        """The group cold start, the placement of a cohort's newcomers, or the cohort's training."""
        if state.search is not None:
            return state, self.search.plan(state.search, round_, available)
        if not state.slots:
            count = min(self.settings.alpha * self.settings.groups, len(available))
            chosen = self._random(round_).choice(len(available), count, replace=False)
            assignment = train_assignment((self.untrained,), evaluate=False, phase=Phase.PRETRAIN)
            devices = (available[i] for i in sorted(chosen))
            return state, RoundPlan(round_, {self.untrained: state.origin}, dict.fromkeys(devices, assignment))
        there = frozenset(available)
        waiting = tuple(d for d in state.cohort if d in there)
        cohort, asked = waiting, state.asked
        if not cohort:
            cohort, asked = drawn_in_turn(self.run, round_, available, state.clusters, state.asked)
        state = dataclasses.replace(state, cohort=(), asked=asked)
        cold = tuple(d for d in cohort if d not in state.clusters)
        if self.settings.rac:
            places = self._random(round_).integers(len(state.slots), size=len(cold)).tolist()
            state = dataclasses.replace(state, clusters={**state.clusters, **dict(zip(cold, places, strict=True))})
        cold = tuple(d for d in cold if d not in state.tried)
        # One group leaves nothing to compare: a newcomer trains its model, and joins it so.
        if not cold or len(state.directions) < 2:
            return self._cohort(state, round_, cohort)
        placement = dataclasses.replace(
            self._placement(state, round_, cold), otherwise=self._cohort(state, round_, cohort)
        )
        return dataclasses.replace(state, cohort=cohort), placement

    def _placement(self, state: FedGroupState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        directions = self._directions(state)
        assignment = place_assignment(self.untrained, tuple(directions))
        return RoundPlan(round_, {self.untrained: state.origin, **directions}, dict.fromkeys(devices, assignment))

    def _directions(self, state: FedGroupState) -> dict[int, ClusterModel]:
        """Return the models along which the groups moved from the origin, by the ids under which devices know them."""
        return {self.untrained + 1 + j: model for j, model in enumerate(state.directions)}

    def _cohort(self, state: FedGroupState, round_: int, cohort: tuple[str, ...]) -> tuple[FedGroupState, RoundPlan]:
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

    def close(self, state: FedGroupState, plan: RoundPlan, given: list[ClientUpdate]) -> tuple[FedGroupState, Outcome]:
        """Alg. 3 after pre-training, Eq. 9 after a placement, else Alg. 2 lines 5 to 7."""
        capped: dict[str, float] = {}
        if state.search is not None:
            return self.search.settle(
                state,
                given,
                plan,
                lambda s, found: dataclasses.replace(
                    s,
                    slots=found.groups,
                    directions=() if self.settings.rac else found.directions,
                    clusters=found.clusters,
                    lengths=(0.0,) * len(found.groups),
                ),
            )
        if not state.slots:
            state, events = self._start(state, given, plan.round)
        elif any(o.phase is Phase.PLACE for o in plan.assignments.values()):
            state, events = self._place(state, given, plan)
        else:
            means = [[c for c in given if c.model == j] for j in range(len(state.slots))]
            least = max(1, self.run.recipe.min_contributors)
            capped = capped_devices(
                (m for m in means if len(m) >= least), self.run.recipe.weighting, self.run.recipe.weight_cap
            )
            state, events = self._train(state, given, plan.round)
        return state, Outcome(state.clusters, events, capped)

    def _start(self, state: FedGroupState, given: list[ClientUpdate], round_: int) -> Step:
        """Alg. 3, lines 6 to 18."""
        s = self.settings
        needed = fewest_updates(s.groups, s.measure)
        looked = self.look(given) if self.look is not None and given else None
        events = () if looked is None else (looked.event(round_, self.untrained),)
        given = given if looked is None else looked.known(given)
        if len(given) < needed:
            return state, (*events, Event(round_, "cold-start-postponed", {"updates": len(given), "needed": needed}))
        rows = [c.row for c in given]
        if looked is not None:
            grouped = looked.numbers(given)
            labels, count = grouped.tolist(), int(grouped.max()) + 1
        elif s.rcc:
            chosen = random_centres(rows, s.groups, self.run.seed)
            labels, count = nearest_directions(rows, [rows[i] for i in chosen], self.backend), len(chosen)
        else:
            grouped = group_updates(rows, s.groups, s.measure, self.run.seed, self.backend)
            if self.run.recipe.min_contributors > 1:
                grouped = join_small(
                    cosine_matrix(rows, backend=self.backend), grouped, self.run.recipe.min_contributors
                )
            labels, count = grouped.tolist(), int(grouped.max()) + 1
        means = []
        for j in range(count):
            members = [c for c, label in zip(given, labels, strict=True) if label == j]
            means.append(self._from_origin(state, members, round_))
        directions = means
        if s.rcc:
            directions = [self._from_origin(state, [given[i]], round_) for i in chosen]
        # Without all directions newcomers would never come to some of the groups.
        compares = not s.rac and all(model is not state.origin for model in directions)
        clusters = {c.device: label for c, label in zip(given, labels, strict=True)}
        sizes = [labels.count(j) for j in range(count)]
        state = dataclasses.replace(
            state,
            slots=tuple(means) if s.start == "mean" else (state.origin,) * count,
            directions=tuple(directions) if compares else (),
            clusters=clusters,
            lengths=(0.0,) * count,
        )
        return state, (*events, Event(round_, "cold-start", {"devices": len(given), "sizes": sizes}))

    def _from_origin(self, state: FedGroupState, members: list[ClientUpdate], round_: int) -> ClusterModel:
        """Return w_0 plus the members' mean update; w_0 itself if they are too few for a mean."""
        if len(members) < max(1, self.run.recipe.min_contributors):
            return state.origin
        return state.origin.moved(self.average(members, "uniform"), len(members), round_)

    def _place(self, state: FedGroupState, given: list[ClientUpdate], plan: RoundPlan) -> Step:
        """Eq. 9."""
        placed = {c.device: c.nearest - self.untrained - 1 for c in given}
        tried = tuple(sorted({*state.tried, *plan.assignments} - placed.keys()))
        state = dataclasses.replace(state, clusters={**state.clusters, **placed}, tried=tried)
        return state, (Event(plan.round, "newcomers", {"groups": placed, "by": "direction"}),)

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
            weighting = self.run.recipe.weighting, self.run.recipe.weight_cap
            lengths = tuple(
                known if after is before else length_after(mine, before, after, *weighting)
                for known, mine, before, after in zip(lengths, by_group, state.slots, slots, strict=True)
            )
            added = aggregate(slots, lengths, self.settings.eta_g, round_)
            if all(fits(s, self.run.recipe.norm_limit * round_) for s in added):
                slots = added
            else:
                events += (Event(round_, "intergroup-refused", {"lengths": list(lengths)}),)
                lengths = state.lengths
        clusters = {**state.clusters, **joined}
        return dataclasses.replace(state, slots=slots, clusters=clusters, lengths=lengths), events

    def final(self, state: FedGroupState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Every device takes its group's model; one that no group knows takes the auxiliary global model.

        While no groups are found, all take the one model. With groups of an earlier run, or with a keeper, one takes the model
        of least loss.
        """
        if state.search is not None:
            return self.search.final(state.search, round_, devices)
        models = {**dict(enumerate(state.slots)), self.auxiliary: state.auxiliary}
        by_loss = self.run.origins > 1 or self.look is not None
        other = tuple(range(len(state.slots))) if by_loss else (self.auxiliary,)
        own = {device: (group,) for device, group in state.clusters.items()}
        assignments = {d: final_assignment(own.get(d, other)) for d in devices}
        used = {j for o in assignments.values() for j in o.candidates}
        return RoundPlan(round_, {j: s for j, s in models.items() if j in used}, assignments, final=True)

    def models_of(self, state: FedGroupState) -> Mapping[int, ClusterModel]:
        """Return the groups' models, those of their directions and, once there are groups, the auxiliary model."""
        if state.search is not None:
            return self.search.models_of(state.search)
        if not state.slots:
            return {}
        # The mean of the groups' models is no mean of opened cells.
        auxiliary = {} if self.look is not None else {self.auxiliary: state.auxiliary}
        return {**dict(enumerate(state.slots)), **auxiliary, **self._directions(state)}

    def scaling(self, state: FedGroupState) -> dict[int, tuple[int, tuple[str, ...]]]:
        """Return the groups and their devices; none if models are added up, which would be in unlike scales. See `Scaling`."""
        if self._adds:
            return {}
        return {j: (j, tuple(d for d, at in state.clusters.items() if at == j)) for j in range(len(state.slots))}

    def rescaled(self, state: FedGroupState, _given: Mapping[int, list[ClientUpdate]]) -> FedGroupState:
        """Groups stay as they are."""
        return state

    def retain(self, state: FedGroupState, active: frozenset[str]) -> FedGroupState:
        """Return the state without devices that are not ``active``."""
        return dataclasses.replace(
            state,
            clusters=retained(state.clusters, active),
            cohort=tuple(d for d in state.cohort if d in active),
            tried=tuple(d for d in state.tried if d in active),
            devices=tuple(d for d in state.devices if d in active),
            search=retained_search(state.search, active),
        )


class FedGrouProx(FedGroup):
    """Alg. 2 with FedProx inside the groups (line 14): devices are held close to their group's model by Eq. 3."""

    name = "fedgrouprox"
    proximal = True
