"""Clustered federated learning: Sattler et al., Algs 1, 3 and 5, with the parameter tree of Alg. 4.

Every cluster averages its own devices' masked updates. If the mean update has become small while single updates
have not (Eqs 32 and 33), the cluster is cut in two by the optimal bipartition of the updates' cosines (Alg. 1),
subject to gamma_max (Eq. 39): split.py. By default such a candidate is validated first (split_validation.py), a split
that no longer pays is taken back (merge.py), and devices may change clusters (reassignment.py). Clusters are sets of
device ids throughout, never positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.backend import cosine_from_gram
from aggregator.numerics.robust import FEWEST_TRIMMED
from aggregator.strategies.base import (
    ClientUpdate,
    ClusterModel,
    Common,
    Event,
    Outcome,
    RoundPlan,
    capped_devices,
    evaluates,
    final_assignment,
    in_order,
    norm_of,
    parse_settings,
    require_one_segment,
    retained,
    train_assignment,
)
from aggregator.strategies.cfl import merge as cfl_merge
from aggregator.strategies.cfl import newcomers as cfl_newcomers
from aggregator.strategies.cfl import reassignment as cfl_moves
from aggregator.strategies.cfl import tree as cfl_tree
from aggregator.strategies.cfl.split import (
    Norms,
    candidates,
    find_cuts,
    has_gap,
    looked_cuts,
    own_groups,
    partition_of,
    settled,
    statistics_cut,
)
from aggregator.strategies.cfl.split_validation import (
    SCALED_TIMES,
    Half,
    Trial,
    combined_p_value,
    contradictions,
    goes_on,
    judge_both,
    refusal,
    trial_assignment,
)
from aggregator.strategies.cfl.state import ROOT, CflSettings, CflState, Cluster, Cut, Step
from aggregator.strategies.cfl.tree import Node
from aggregator.strategies.drawing import drawn, drawn_by_cluster
from shoal.protocol.cells import Partition
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import STATISTICS_MODEL, TRIAL_MARGINS, Assignment, Phase, Share

MAX_WAITS = 5
"""Rounds that a trial may lose to absent devices before it is given up."""
NEAR: Final = 10
"""A refused candidate whose combined p-value is below so many times the limit is tried again after half of the cool-down."""
MAX_EXTENSIONS: Final = 6
"""How often the trial of a cut with a separation gap goes on: the control trains as many rounds as the halves, then these do."""
MOST_LOST: Final = 0.1
"""Where one side alone shows a split, the other side loses by it if its loss is more than this share of that side's gain."""
ABSENT: Final = (
    f"in more than {MAX_WAITS} rounds too few of one half's devices answered: it is tried again when they do"
)
FEWEST_COMPARED: Final = 20
"""Devices of a cluster whose updates are compared, if it has as many: the others join a half like newcomers."""


class Cfl(Common):
    """CFL on masked updates."""

    name = "cfl"
    settings_type = CflSettings
    settings: CflSettings
    state_type = CflState

    def prepare(self) -> None:
        """Check the run and its settings, and make what follows from them."""
        self.settings.check()
        require_one_segment(self.run)
        self.least_side = self.settings.least_side(self.run)
        self._trial_length = self.settings.trial_rounds + 1 if self.settings.validate else 0

    @staticmethod
    def models(_run: RunPlan) -> int:
        """Most models that a round names: clusters, halves on trial, and nodes that newcomers or checks ask for."""
        return 1024

    @staticmethod
    def partitions(run: RunPlan, gram: NDArray[np.float64]) -> tuple[Partition, ...]:
        """Return the candidate splits by the products of a cluster's updates, (n, n) float64: see `find_cuts`."""
        settings: CflSettings = parse_settings(CflSettings, run)
        similarity = cosine_from_gram(gram)
        return tuple(
            partition_of(similarity, cut) for cut in candidates(settings, similarity, settings.least_side(run))
        )

    def init(self, devices: tuple[str, ...]) -> CflState:
        """Return the state before round 1: one cluster of all devices (Alg. 5, line 3), or those of an earlier run.

        Of these, devices choose by loss, as newcomers do.
        """
        if self.run.origins == 1:
            return CflState({ROOT: Cluster(ROOT, devices, ClusterModel())})
        tree, models = cfl_tree.grown(ROOT, self.run.origins, self.settings.check_every)
        return CflState(
            {leaf: Cluster(leaf, (), model) for leaf, model in models.items()},
            tree=tree,
            unplaced=dict.fromkeys(devices, ROOT),
            next_id=ROOT + len(tree) + len(models),
        )

    def plan(self, state: CflState, round_: int, available: tuple[str, ...]) -> tuple[CflState, RoundPlan]:
        """Clusters train; halves on trial train their own model, then score both; newcomers choose an edge of the tree.

        Partial participation draws whole clusters in turn, for training. All available devices score and all newcomers train,
        since scores contain no update and newcomers' answers place them. In the other plan newcomers choose by loss. If trials
        leave no available device anything to do, they are abandoned.
        """
        there = set(available)
        state = cfl_newcomers.welcome(state, there)
        looked = cfl_moves.look_due(state, self.settings, round_)
        state, present = self._drawn(state, round_, available, looked=looked)
        evaluate = evaluates(self.run, round_)
        models: dict[int, ClusterModel] = {}
        assignments: dict[str, Assignment] = {}
        checked = {c: node for node in cfl_merge.due(state, self.settings, round_) for c in node.children}
        offers = cfl_moves.offers(state, round_ // self.settings.look_rounds) if looked else {}
        for cluster in state.clusters.values():
            models[cluster.id] = cluster.slot
            node, trial = checked.get(cluster.id), state.trials.get(cluster.id)
            if trial is not None:
                for half in (trial.left, trial.right):
                    models[half.model] = half.slot
                    assignment = trial_assignment(trial, half, self.settings.trial_rounds)
                    asked = self._on_trial(half, assignment, there, present)
                    assignments.update(dict.fromkeys(asked, assignment))
            elif node is not None:
                models[node.id] = node.slot
                assignment = cfl_merge.check_assignment(cluster.id, node.id)
                assignments.update({d: assignment for d in cluster.members if d in there})
            else:
                assignment = train_assignment(offers.get(cluster.id, (cluster.id,)), evaluate=evaluate)
                assignments.update({d: assignment for d in cluster.members if d in present})
        placed = cfl_newcomers.assignments(state, there)
        by_loss = {**assignments, **cfl_newcomers.assignments(state, there, by_loss=True)}
        assignments |= placed
        if there and not assignments and state.trials:
            return self.plan(dataclasses.replace(state, trials={}), round_, available)
        walking = any(o.phase is Phase.PLACE for o in placed.values())
        waiting = any(d in there and d not in assignments for d in state.unplaced)
        seal = self._sealed_ahead(state, round_, walking or waiting)
        seal &= models.keys() | state.tree.keys()
        models |= {node: state.tree[node].slot for node in sorted(seal - models.keys())}
        if not walking:
            return state, RoundPlan(round_, models, assignments, seal=seal)
        nodes = sorted({state.unplaced[d] for d, o in placed.items() if o.phase is Phase.PLACE})
        compared = {model: value for node in nodes for model, value in state.tree[node].compared.items()}
        plan_by_loss = RoundPlan(round_, models, by_loss, seal=seal)
        return state, RoundPlan(round_, {**models, **compared}, assignments, seal=seal, otherwise=(state, plan_by_loss))

    def _drawn(
        self, state: CflState, round_: int, available: tuple[str, ...], *, looked: bool
    ) -> tuple[CflState, set[str]]:
        """Return the devices to train: of whole clusters in turn, and of a cluster to compare at least FEWEST_COMPARED.

        A cluster is compared in the first round that its cool-down allows, and a comparison without a candidate split begins a
        new one, so it is rare that more devices train than the plan's participation. Alg. 5 alone compares whom the round draws.
        """
        if not self.settings.validate:
            return state, set(drawn(self.run, round_, available))
        there = set(available)
        members = {c.id: [d for d in c.members if d in there] for c in state.clusters.values()}
        turns = drawn_by_cluster(self.run, round_, members, state.asked, self.run.recipe.min_contributors)
        state = dataclasses.replace(state, asked={**state.asked, **dict.fromkeys(turns, round_)})
        present = {d for chosen in turns.values() for d in chosen}
        for id_, mine in members.items():
            if looked and len(mine) < self.run.recipe.min_contributors:
                # A leaf that can't be averaged any more gets no turn, but its devices may leave it.
                present.update(mine)
            size = min(len(mine), FEWEST_COMPARED)
            quiet = id_ in state.trials or self._is_quiet(state.clusters[id_], round_)
            if not quiet and len(turns.get(id_, ())) < size:
                rng = np.random.default_rng([self.run.seed, round_, id_])
                present.update(mine[i] for i in rng.choice(len(mine), size, replace=False))
        return state, present

    def _is_quiet(self, cluster: Cluster, round_: int) -> bool:
        return round_ <= self.settings.warm_up or round_ < cluster.quiet_until

    def _sealed_ahead(self, state: CflState, round_: int, newcomers_wait: bool) -> frozenset[int]:
        """Return the models of which devices will need checkpoints in the next round, since they hold only their own leaf's."""
        if round_ == self.run.recipe.rounds and self.settings.path:
            return frozenset(state.clusters.keys() | state.tree.keys())
        nodes = {node.id for node in cfl_merge.due(state, self.settings, round_ + 1)}
        # After the last round of a trial all of its devices score, and some may not have trained.
        last = [t for t in state.trials.values() if t.trained + 1 >= t.length(self.settings.trial_rounds)]
        nodes |= {model for t in last for model in (t.left.model, t.right.model, t.cluster)}
        others = newcomers_wait or cfl_moves.look_due(state, self.settings, round_ + 1)
        return frozenset(nodes | state.clusters.keys() if others else nodes)

    def _on_trial(self, half: Half, assignment: Assignment, there: set[str], present: set[str]) -> list[str]:
        """Return the devices of a half to assign: the drawn ones, or all available ones to score or if too few were drawn."""
        chosen = [d for d in half.members if d in present]
        if assignment.margins or len(chosen) < self.least_side:
            return [d for d in half.members if d in there]
        return chosen

    def close(self, state: CflState, plan: RoundPlan, given: list[ClientUpdate]) -> tuple[CflState, Outcome]:
        """Alg. 5, lines 12 to 22, for every cluster; trials, checks and newcomers move on by one step."""
        heard = {d: round_ for d, round_ in state.heard.items() if plan.round - round_ <= self.settings.max_age}
        state = dataclasses.replace(state, heard=heard)
        if plan.round <= self.settings.early_rounds:
            largest = max((c.norm for c in given), default=0.0)
            state = dataclasses.replace(state, early_norm=max(state.early_norm, largest))
        events: list[Event] = []
        for placing in (cfl_newcomers.join, cfl_newcomers.place):
            state, news = placing(state, given, plan.round)
            events.extend(news)
        if cfl_moves.look_due(state, self.settings, plan.round):
            turn = plan.round // self.settings.look_rounds
            state, news = cfl_moves.move(state, given, self.least_side, plan.round, turn)
            events.extend(news)
        due = cfl_merge.due(state, self.settings, plan.round)
        checked = {child for node in due for child in node.children}
        means: list[list[ClientUpdate]] = []
        for cluster in tuple(c for c in state.clusters.values() if c.id not in checked):
            trial = state.trials.get(cluster.id)
            if trial is not None:
                halves = [[c for c in given if c.device in h.members] for h in (trial.left, trial.right)]
                means += halves if min(map(len, halves)) >= self.least_side else []
                state, news = self._continue_trial(state, trial, given, plan.round)
            else:
                members = set(cluster.members)
                mine = [c for c in given if c.phase is Phase.TRAIN and c.model == cluster.id and c.device in members]
                means += [mine] if len(mine) >= self.run.recipe.min_contributors else []
                state, news = self._close_cluster(state, cluster, mine, plan.round)
            events.extend(news)
        for node in due:
            state, news = cfl_merge.close_check(state, node, given, self.settings, self.run, plan.round)
            events.extend(news)
        capped = capped_devices(means, self.run.recipe.weighting, self.run.recipe.weight_cap)
        return state, Outcome({d: c.id for c in state.clusters.values() for d in c.members}, tuple(events), capped)

    def _close_cluster(self, state: CflState, cluster: Cluster, given: list[ClientUpdate], round_: int) -> Step:
        if len(given) < self.run.recipe.min_contributors:
            return state, ()
        mean = self.average(given, self.run.recipe.weighting, self.run.recipe.weight_cap)
        norms = Norms(norm_of(mean), max(c.norm for c in given))
        heard = {**state.heard, **{c.device: round_ for c in given}}
        moved = dataclasses.replace(cluster, slot=cluster.slot.moved(mean, len(given), round_))
        state = dataclasses.replace(state, heard=heard, clusters={**state.clusters, cluster.id: moved})
        trace: tuple[Event, ...] = ()
        if self.settings.trace:
            figures = {"cluster": cluster.id, "mean_norm": norms.mean, "max_norm": norms.largest}
            trace = (Event(round_, "norms", figures),)
        if self._is_quiet(cluster, round_) or round_ + self._trial_length > self.run.recipe.rounds:
            return state, trace
        shown = state.cuts.get(cluster.id)
        if shown is not None:
            state = dataclasses.replace(state, cuts={k: cut for k, cut in state.cuts.items() if k != cluster.id})
            left, right = (tuple(d for d in side if d in cluster.members) for side in shown.sides)
            needed = 2 * SCALED_TIMES * self.settings.trial_rounds + 2
            if min(len(left), len(right)) >= self.least_side and round_ + needed <= self.run.recipe.rounds:
                cut = dataclasses.replace(shown, sides=(left, right))
                state, events = self._open_trial(state, cluster, cut, round_, scaled=True)
                return state, (*trace, *events)
        cuts: tuple[Cut, ...] = ()
        if settled(self.settings, norms, state.early_norm):
            if self.look is None:
                cuts = find_cuts(self.settings, given, self.least_side, norms, self.backend)
            elif len(given) >= 2 * self.least_side:
                looked = self.look(given)
                cuts, trace = looked_cuts(looked), (*trace, looked.event(round_, cluster.id))
        if not cuts:
            share = self.run.recipe.participation
            if self.settings.validate and share < 1 and share * len(cluster.members) < FEWEST_COMPARED:
                moved = dataclasses.replace(moved, quiet_until=round_ + 1 + self.settings.refused_cool_down)
                state = dataclasses.replace(state, clusters={**state.clusters, moved.id: moved})
            return state, trace
        cut = cuts[cluster.refused % len(cuts)]
        if self.settings.validate:
            state, events = self._open_trial(state, cluster, cut, round_)
        else:
            state, events = self._split_at_once(state, cluster, cut, given, round_)
        return state, (*trace, *events)

    def _split_at_once(
        self, state: CflState, before: Cluster, cut: Cut, given: list[ClientUpdate], round_: int
    ) -> Step:
        """Alg. 5 alone: both children start at the parent's old model plus their own side's mean."""
        parent = state.clusters[before.id]
        halves = []
        for i, side in enumerate(cut.sides):
            slot = parent.slot
            if len(side) >= self.run.recipe.min_contributors:
                mine = [c for c in given if c.device in side]
                mean = self.average(mine, self.run.recipe.weighting, self.run.recipe.weight_cap)
                slot = before.slot.moved(mean, len(side), round_)
            halves.append(Half(state.next_id + i, side, slot))
        state = dataclasses.replace(state, next_id=state.next_id + 2)
        moved = all(half.slot is not parent.slot for half in halves)
        edges = (before.slot, *(half.slot for half in halves)) if moved else ()
        return self._split(state, parent, (halves[0], halves[1]), edges, cut.figures, round_)

    def _open_trial(self, state: CflState, before: Cluster, cut: Cut, round_: int, *, scaled: bool = False) -> Step:
        parent = state.clusters[before.id]
        left, right = (Half(state.next_id + i, side, parent.slot) for i, side in enumerate(cut.sides))
        trial = Trial(parent.id, left, right, parent.slot, cut.figures, scaled=scaled)
        if scaled:
            trial = dataclasses.replace(trial, trained=-trial.length(self.settings.trial_rounds))
        detail = {"cluster": parent.id, "sizes": [len(left.members), len(right.members)], **cut.figures}
        state = dataclasses.replace(state, trials={**state.trials, parent.id: trial}, next_id=state.next_id + 2)
        return state, (Event(round_, "trial-opened", detail),)

    def _continue_trial(self, state: CflState, trial: Trial, given: list[ClientUpdate], round_: int) -> Step:
        sides = [frozenset(h.members) for h in (trial.left, trial.right)]
        mine = [[c for c in given if c.device in side] for side in sides]
        if min(map(len, mine)) < self.least_side:
            trial = dataclasses.replace(trial, waited=trial.waited + 1)
            if trial.waited > MAX_WAITS:
                return self._end_trial(state, trial, {"reason": ABSENT}, round_)
            return dataclasses.replace(state, trials={**state.trials, trial.cluster: trial}), ()
        state, trial = self._moved_on(state, trial, mine, round_)
        if trial.trained <= trial.length(self.settings.trial_rounds):
            return dataclasses.replace(state, trials={**state.trials, trial.cluster: trial}), ()
        untrained, verdicts, by_labels = (judge_both(mine, which) for which in range(TRIAL_MARGINS))
        # Only margins with labels in balance prove a group of few devices that happen to agree: label skew is no group.
        untrained, by_labels = ([dataclasses.replace(v, p_value=v.shared) for v in vs] for vs in (untrained, by_labels))
        alone = [contradictions(m, trial.cluster, round_, self.settings.margin) for m in mine]
        apart = (*alone[0], *alone[1])
        detail = {
            **trial.figures,
            "prefer": [v.prefer for v in verdicts],
            "margin": [v.margin for v in verdicts],
            "p_value": [v.p_value for v in verdicts],
            "untrained": [v.margin for v in untrained],
            "untrained_p": [v.p_value for v in untrained],
        }
        tried = state.clusters[trial.cluster].refused + trial.extended
        both = self.settings.convinces(verdicts, tried) or self.settings.clear(untrained, tried)
        both |= self.settings.clear(by_labels, tried) and self.settings.likely(verdicts)
        # The rest, of several groups, hardly gains if one group leaves it; of fewer devices, it would be those that fit nowhere.
        own, sizes = own_groups(trial.figures), [v.devices for v in verdicts]
        leaves = len(own) == 1 and FEWEST_TRIMMED <= sizes[own[0]] <= sizes[1 - own[0]]
        single = [[v] for side, v in enumerate(verdicts) if trial.scaled or (leaves and side in own)]
        gap = has_gap(trial.figures)
        # The statistics have shown two groups, without a look at any loss: it is enough that neither loses.
        both |= trial.scaled and gap and all(v.margin > 0 for v in verdicts)
        if not (both or any(self.settings.convinces(one, tried) for one in single)):
            has_time = trial.extended < MAX_EXTENSIONS or round_ == self.run.recipe.rounds
            weak = any(map(goes_on, single)) or (gap and goes_on(verdicts))
            if weak and has_time:
                again = -1 - trial.length(self.settings.trial_rounds)
                trial = dataclasses.replace(trial, trained=again, extended=trial.extended + 1)
                return dataclasses.replace(state, trials={**state.trials, trial.cluster: trial}), apart
            why = refusal(verdicts, alone, self.settings.prefer, self.settings.margin)
            state, ended = self._end_trial(state, trial, {**detail, "reason": why}, round_)
            return state, (*apart, *ended)
        trials = {k: t for k, t in state.trials.items() if k != trial.cluster}
        control = state.clusters[trial.cluster]
        parent = dataclasses.replace(control, slot=trial.before)
        left, right = trial.left, trial.right
        if trial.scaled or not both:
            # Devices that lose by the split, or by their statistics, of which one may be false, go on as before.
            bound = -MOST_LOST * max(v.margin for v in verdicts)
            renamed = {h.model: state.next_id + i for i, h in enumerate((left, right)) if verdicts[i].margin < bound}
            left, right = (
                dataclasses.replace(h, model=renamed[h.model], slot=control.slot) if h.model in renamed else h
                for h in (left, right)
            )
            state = dataclasses.replace(
                state,
                cuts={renamed.get(model, model): cut for model, cut in state.cuts.items()},
                kept=state.kept.union(renamed.values() if trial.scaled else ()),
                next_id=state.next_id + 2,
            )
        state = dataclasses.replace(state, trials=trials)
        edges = (trial.before, *trial.firsts) if trial.firsts else ()
        state, ended = self._split(state, parent, (left, right), edges, detail, round_)
        return state, (*apart, *ended)

    def _moved_on(
        self, state: CflState, trial: Trial, mine: Sequence[list[ClientUpdate]], round_: int
    ) -> tuple[CflState, Trial]:
        """Move each half by the mean of its own updates, and the control by the mean of all.

        A prolonged or scaled trial moves them in turn: updates that halves have long gone their own way with, or that were made
        in another scale, would spoil the control.
        """

        def moved(slot: ClusterModel, given: list[ClientUpdate]) -> ClusterModel:
            mean = self.average(given, self.run.recipe.weighting, self.run.recipe.weight_cap)
            return slot.moved(mean, len(given), round_)

        if trial.trained < 0 or not (trial.extended or trial.scaled):
            parent = state.clusters[trial.cluster]
            control = dataclasses.replace(parent, slot=moved(parent.slot, in_order(c for side in mine for c in side)))
            state = dataclasses.replace(state, clusters={**state.clusters, parent.id: control})
        if trial.trained >= 0:
            left, right = (
                dataclasses.replace(half, slot=moved(half.slot, given))
                for half, given in zip((trial.left, trial.right), mine, strict=True)
            )
            # Directions in different scales can't be compared.
            firsts = () if trial.scaled else trial.firsts or (left.slot, right.slot)
            trial = dataclasses.replace(trial, left=left, right=right, firsts=firsts)
        return state, dataclasses.replace(trial, trained=trial.trained + 1)

    def scaling(self, state: CflState) -> dict[int, tuple[int, tuple[str, ...]]]:
        """Return clusters and halves on trial, each in the scale of the cluster above until it has statistics of its own.

        With ``path`` devices keep models of several clusters for the same samples, so all stay in the fleet's scale.
        """
        if self.settings.path:
            return {}
        above = cfl_tree.parents(state.tree)
        halves = ((t, h) for t in state.trials.values() for h in (t.left, t.right))
        found = {h.model: (t.cluster, h.members if t.scaled else ()) for t, h in halves}
        for c in state.clusters.values():
            if c.id in above:
                found[c.id] = (above[c.id], () if c.id in state.kept else c.members)
        return found

    def rescaled(self, state: CflState, given: Mapping[int, list[ClientUpdate]]) -> CflState:
        """Return the state with the splits that the statistics of a cluster, a half or the fleet show."""
        cuts = dict(state.cuts)
        for model, rows in given.items() if self.settings.validate and self.look is None else ():
            cut = statistics_cut(rows, self.least_side, self.backend)
            cuts |= {} if cut is None else {ROOT if model == STATISTICS_MODEL else model: cut}
        return dataclasses.replace(state, cuts=cuts)

    def _end_trial(self, state: CflState, trial: Trial, detail: Mapping[str, Any], round_: int) -> Step:
        """Go on with the control, which has trained as the parent would have, and begin its cool-down."""
        parent = state.clusters[trial.cluster]
        # Evidence that is near asks for the same cut again, and soon; otherwise it is another one's turn.
        near = combined_p_value(detail.get("p_value", (1.0,))) < NEAR * self.settings.p_value
        quiet = round_ + 1 + self.settings.refused_cool_down // (2 if near else 1)
        parent = dataclasses.replace(parent, quiet_until=quiet, refused=parent.refused + (not near))
        trials = {k: t for k, t in state.trials.items() if k != trial.cluster}
        sizes = [len(trial.left.members), len(trial.right.members)]
        state = dataclasses.replace(state, trials=trials, clusters={**state.clusters, parent.id: parent})
        return state, (Event(round_, "split-refused", {"cluster": parent.id, "sizes": sizes, **detail}),)

    def _split(
        self,
        state: CflState,
        parent: Cluster,
        halves: tuple[Half, Half],
        edges: tuple[ClusterModel, ...],
        detail: Mapping[str, Any],
        round_: int,
    ) -> Step:
        """Replace ``parent`` by its halves and grow the tree; members without an update are placed like newcomers."""
        first, second = halves
        check_at = round_ + self.settings.check_every
        node = Node(parent.id, parent.slot, (first.model, second.model), check_at, edges=edges)
        clusters = {k: c for k, c in state.clusters.items() if k != parent.id}
        quiet = round_ + 1 + self.settings.cool_down
        clusters |= {h.model: Cluster(h.model, h.members, h.slot, quiet) for h in halves}
        asked = {**state.asked, **{h.model: state.asked.get(parent.id, 0) for h in halves}}
        placed = {*first.members, *second.members}
        lost = dict.fromkeys((d for d in parent.members if d not in placed), parent.id)
        state = dataclasses.replace(
            state,
            clusters=clusters,
            tree={**state.tree, node.id: node},
            unplaced={**state.unplaced, **lost},
            asked={id_: asked[id_] for id_ in clusters if id_ in asked},
        )
        sizes = [len(first.members), len(second.members)]
        info = {"cluster": parent.id, "children": list(node.children), "sizes": sizes, **detail}
        return state, (Event(round_, "split", info),)

    def final(self, state: CflState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Every device takes its cluster's model; one that is not placed yet takes its node's, an unknown one the root's.

        On trial it takes the better one of its half's model and the control, by its validation share. With ``path`` each also
        gets the models above its own, up to the root (section V-C). Where clusters are those of an earlier run, a device that is
        not placed takes the model of least loss.
        """
        slots = self.models_of(state)
        own = {d: c.id for c in state.clusters.values() for d in c.members} | dict(state.unplaced)
        halves = {d: h.model for t in state.trials.values() for h in (t.left, t.right) for d in h.members}
        models: dict[int, ClusterModel] = {}
        assignments: dict[str, Assignment] = {}
        for device in devices:
            at = own.get(device, ROOT)
            line = cfl_tree.path(state.tree, at) if self.settings.path else (at,)
            models |= {m: slots[m] for m in line}
            assignment = final_assignment(line[::-1])
            if self.settings.path:
                assignment = dataclasses.replace(assignment, phase=Phase.KEEP)
            elif at in state.tree and self.run.origins > 1:
                assignment = final_assignment(cfl_tree.leaves(state.tree, at))
                models |= {m: slots[m] for m in assignment.candidates}
            elif device in halves:
                models[halves[device]] = slots[halves[device]]
                tried = (*assignment.candidates, halves[device])
                assignment = dataclasses.replace(assignment, candidates=tried, share=Share.VALIDATION)
            assignments[device] = assignment
        return RoundPlan(round_, models, assignments, final=True)

    def models_of(self, state: CflState) -> Mapping[int, ClusterModel]:
        """Return the models of clusters, of the tree's nodes and of halves on trial."""
        models = {c.id: c.slot for c in state.clusters.values()} | {n.id: n.slot for n in state.tree.values()}
        return models | {h.model: h.slot for t in state.trials.values() for h in (t.left, t.right)}

    def retain(self, state: CflState, active: frozenset[str]) -> CflState:
        """Return the state without devices that are not ``active``; a cluster of revoked devices alone stays, without members."""

        def left(members: tuple[str, ...]) -> tuple[str, ...]:
            return tuple(d for d in members if d in active)

        clusters = {k: dataclasses.replace(c, members=left(c.members)) for k, c in state.clusters.items()}
        trials = {
            k: dataclasses.replace(
                t,
                left=dataclasses.replace(t.left, members=left(t.left.members)),
                right=dataclasses.replace(t.right, members=left(t.right.members)),
            )
            for k, t in state.trials.items()
        }
        return dataclasses.replace(
            state,
            clusters=clusters,
            trials=trials,
            unplaced=retained(state.unplaced, active),
            heard=retained(state.heard, active),
        )
