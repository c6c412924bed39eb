"""Clustered federated learning: Sattler et al., Algs 1, 3 and 5, with the parameter tree of Alg. 4.

Every cluster averages its own devices' masked updates. Where the mean update has become small while single updates
have not (Eqs 32 and 33), the cluster is cut in two by the optimal bipartition of the updates' cosines (Alg. 1),
subject to gamma_max (Eq. 31's bound). By default such a candidate is first put on trial (cfl_trial.py). Clusters are
sets of device ids throughout, never positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from aggregator.numerics.backend import Backend
from aggregator.numerics.bipartition import bipartition
from aggregator.numerics.gap import is_safe_split
from aggregator.numerics.similarity import cosine_matrix
from aggregator.strategies import cfl_state, cfl_tree
from aggregator.strategies.base import (
    Average,
    Contribution,
    Dump,
    Event,
    Fetch,
    Outcome,
    RoundPlan,
    Slot,
    drawn,
    evaluates,
    final_order,
    gather,
    in_order,
    mean_update,
    norm_of,
    parse_settings,
    require,
    train_order,
)
from aggregator.strategies.cfl_state import ROOT, CflSettings, CflState, Cluster
from aggregator.strategies.cfl_tree import Node
from aggregator.strategies.cfl_trial import Half, Trial, Verdict, judge
from wire.documents import RunPlan
from wire.messages import Order, Phase, Share
from wire.types import Float32Vector

MAX_WAITS = 5
"""Rounds that a trial may lose to absent devices before it is given up."""

Step = tuple[CflState, tuple[Event, ...]]


class Cfl:
    """CFL on masked offsets."""

    name = "cfl"

    def __init__(self, run: RunPlan, backend: Backend | None = None, average: Average = mean_update) -> None:
        self.run = run
        self.average = average
        self.settings: CflSettings = parse_settings(CflSettings, run)
        self.settings.check()
        require(run.origins == 1, "cfl starts from one origin")
        require(all(g.name == "cluster" for g in run.segments), "cfl has no shared segment")
        self.backend = backend
        self.least_side = max(self.settings.min_side, run.min_contributors)

    @staticmethod
    def models(_run: RunPlan) -> int:
        """Most models a run names at a time: every split and every trial takes two new ids."""
        return 1024

    def init(self, devices: tuple[str, ...]) -> CflState:
        """Return the state before round 1: one cluster of all devices (Alg. 5, line 3)."""
        return CflState({ROOT: Cluster(ROOT, devices, Slot())})

    def plan(self, state: CflState, round_: int, available: tuple[str, ...]) -> tuple[CflState, RoundPlan]:
        """Clusters train; halves on trial train their own model, then score both; newcomers train their node's model."""
        present = set(drawn(self.run, round_, available))
        state = self._welcome(state, present)
        evaluate = evaluates(self.run, round_)
        models: dict[int, Slot] = {}
        orders: dict[str, Order] = {}
        for cluster in state.clusters.values():
            models[cluster.id] = cluster.slot
            trial = state.trials.get(cluster.id)
            if trial is None:
                order = train_order((cluster.id,), evaluate=evaluate)
                orders.update({d: order for d in cluster.members if d in present})
                continue
            for own, other in ((trial.left, trial.right), (trial.right, trial.left)):
                models[own.model] = own.slot
                order = self._trial_order(trial, own, other)
                orders.update({d: order for d in own.members if d in present})
        for device, node in state.unplaced.items():
            if device in present:
                models[node] = state.tree[node].slot
                orders[device] = train_order((node,), evaluate=False)
        return state, RoundPlan(round_, models, orders)

    def _trial_order(self, trial: Trial, own: Half, other: Half) -> Order:
        if trial.trained < self.settings.trial_rounds:
            return train_order((own.model,), evaluate=False, phase=Phase.TRIAL)
        return Order(
            int(Phase.SCORE), (own.model, other.model), int(Share.VALIDATION), train=False, evaluate=False, margins=True
        )

    def _welcome(self, state: CflState, present: set[str]) -> CflState:
        """Devices that no cluster knows join the only cluster, or start at the root of the tree."""
        known = {d for c in state.clusters.values() for d in c.members} | set(state.unplaced)
        new = sorted(present - known)
        if not new:
            return state
        if state.tree:
            return dataclasses.replace(state, unplaced={**state.unplaced, **dict.fromkeys(new, ROOT)})
        trial = state.trials.get(ROOT)
        if trial is not None:
            return state
        root = state.clusters[ROOT]
        return dataclasses.replace(
            state, clusters={**state.clusters, ROOT: dataclasses.replace(root, members=(*root.members, *new))}
        )

    def absorb(self, state: CflState, contribution: Contribution) -> CflState:
        """Keep the contribution for `close`."""
        return dataclasses.replace(state, gathered=gather(state.gathered, contribution, self.run))

    def close(self, state: CflState, plan: RoundPlan) -> tuple[CflState, Outcome]:
        """Alg. 5, lines 12 to 22, for every cluster; trials and newcomers move on by one step."""
        given = in_order(state.gathered.values())
        state = dataclasses.replace(state, gathered={})
        if plan.round <= self.settings.early_rounds:
            largest = max((c.norm for c in given), default=0.0)
            state = dataclasses.replace(state, early_norm=max(state.early_norm, largest))
        events: list[Event] = []
        for cluster in tuple(state.clusters.values()):
            trial = state.trials.get(cluster.id)
            if trial is not None:
                state, news = self._continue_trial(state, trial, given, plan.round)
            else:
                members = set(cluster.members)
                mine = [c for c in given if c.phase is Phase.TRAIN and c.model == cluster.id and c.device in members]
                state, news = self._close_cluster(state, cluster, mine, plan.round)
            events.extend(news)
        state, news = self._place_newcomers(state, given, plan.round)
        events.extend(news)
        return state, Outcome({d: c.id for c in state.clusters.values() for d in c.members}, tuple(events))

    def _close_cluster(self, state: CflState, cluster: Cluster, given: list[Contribution], round_: int) -> Step:
        if len(given) < self.run.min_contributors:
            return state, ()
        mean = self.average(given, self.run.weighting)
        newest = {**state.newest, **{c.device: c for c in given}}
        moved = dataclasses.replace(cluster, slot=cluster.slot.moved(mean, len(given), round_))
        state = dataclasses.replace(state, newest=newest, clusters={**state.clusters, cluster.id: moved})
        if round_ <= self.settings.warm_up or round_ < cluster.quiet_until or not self._settled(state, given, mean):
            return state, ()
        rows = [newest[d] for d in sorted(cluster.members) if d in newest]
        if len(rows) < 2 * self.least_side:
            return state, ()
        cut = bipartition(cosine_matrix([c.row for c in rows], backend=self.backend), linkage=self.settings.linkage)
        sides = ([rows[i] for i in cut.left], [rows[i] for i in cut.right])
        if min(map(len, sides)) < self.least_side or not is_safe_split(cut.cross_max, self.settings.gamma_max):
            return state, ()
        if self.settings.validate:
            return self._open_trial(state, moved, sides, cut.cross_max, round_)
        # Alg. 5 alone: both children start at the parent's old model plus their own side's mean.
        halves = [Half(state.next_id + i, tuple(c.device for c in side), cluster.slot) for i, side in enumerate(sides)]
        fresh = {c.device for c in given}
        slots = []
        for half, side in zip(halves, sides, strict=True):
            now = [c for c in side if c.device in fresh]
            enough = len(now) >= self.run.min_contributors
            step = cluster.slot.moved(self.average(now, self.run.weighting), len(now), round_) if enough else moved.slot
            slots.append(dataclasses.replace(half, slot=step))
        state = dataclasses.replace(state, next_id=state.next_id + 2)
        return self._split(state, moved, (slots[0], slots[1]), rows, {"cross_max": cut.cross_max}, round_)

    def _settled(self, state: CflState, given: list[Contribution], mean: Float32Vector) -> bool:
        """Eqs 32 and 33: the mean has (nearly) vanished, single updates have not."""
        largest = max(c.norm for c in given)
        if self.settings.form == "relative":
            return norm_of(mean) < self.settings.eps1 * largest and largest > self.settings.eps2 * state.early_norm
        return norm_of(mean) < self.settings.eps1 and largest > self.settings.eps2

    def _open_trial(
        self, state: CflState, parent: Cluster, sides: tuple[list[Contribution], ...], cross_max: float, round_: int
    ) -> Step:
        left, right = (
            Half(state.next_id + i, tuple(c.device for c in side), parent.slot) for i, side in enumerate(sides)
        )
        trial = Trial(parent.id, left, right, tuple(in_order([*sides[0], *sides[1]])), cross_max)
        detail = {"cluster": parent.id, "sizes": [len(left.members), len(right.members)], "cross_max": cross_max}
        state = dataclasses.replace(state, trials={**state.trials, parent.id: trial}, next_id=state.next_id + 2)
        return state, (Event(round_, "trial-opened", detail),)

    def _continue_trial(self, state: CflState, trial: Trial, given: list[Contribution], round_: int) -> Step:
        mine = [[c for c in given if c.device in h.members] for h in (trial.left, trial.right)]
        if min(map(len, mine)) < self.least_side:
            trial = dataclasses.replace(trial, waited=trial.waited + 1)
            if trial.waited > MAX_WAITS:
                return self._end_trial(state, trial, {"reason": "devices absent"}, round_)
            return dataclasses.replace(state, trials={**state.trials, trial.cluster: trial}), ()
        if trial.trained < self.settings.trial_rounds:
            halves = [
                dataclasses.replace(h, slot=h.slot.moved(self.average(m, self.run.weighting), len(m), round_))
                for h, m in zip((trial.left, trial.right), mine, strict=True)
            ]
            trial = dataclasses.replace(trial, left=halves[0], right=halves[1], trained=trial.trained + 1)
            return dataclasses.replace(state, trials={**state.trials, trial.cluster: trial}), ()
        verdicts = [judge([c.margins[1] for c in m]) for m in mine]
        detail = {
            "cross_max": trial.cross_max,
            "prefer": [v.prefer for v in verdicts],
            "margin": [v.margin for v in verdicts],
            "p_value": [v.p_value for v in verdicts],
        }
        if not all(self._prefers(v) for v in verdicts):
            return self._end_trial(state, trial, detail, round_)
        trials = {k: t for k, t in state.trials.items() if k != trial.cluster}
        parent = state.clusters[trial.cluster]
        state = dataclasses.replace(state, trials=trials)
        return self._split(state, parent, (trial.left, trial.right), list(trial.evidence), detail, round_)

    def _prefers(self, verdict: Verdict) -> bool:
        s = self.settings
        return verdict.prefer > s.prefer and verdict.margin >= s.margin and verdict.p_value < s.p_value

    def _end_trial(self, state: CflState, trial: Trial, detail: Mapping[str, Any], round_: int) -> Step:
        """The parent goes on as it was and is left alone for a while."""
        parent = dataclasses.replace(
            state.clusters[trial.cluster], quiet_until=round_ + 1 + self.settings.refused_cool_down
        )
        trials = {k: t for k, t in state.trials.items() if k != trial.cluster}
        sizes = [len(trial.left.members), len(trial.right.members)]
        state = dataclasses.replace(state, trials=trials, clusters={**state.clusters, parent.id: parent})
        return state, (Event(round_, "split-refused", {"cluster": parent.id, "sizes": sizes, **detail}),)

    def _split(
        self,
        state: CflState,
        parent: Cluster,
        halves: tuple[Half, Half],
        evidence: list[Contribution],
        detail: Mapping[str, Any],
        round_: int,
    ) -> Step:
        """Replace ``parent`` by its halves and grow the tree; members without an update are placed like newcomers."""
        edges = tuple(tuple(c for c in evidence if c.device in h.members) for h in halves)
        first, second = halves
        node = Node(parent.id, parent.slot, (first.model, second.model), (edges[0], edges[1]))
        clusters = {k: c for k, c in state.clusters.items() if k != parent.id}
        quiet = round_ + 1 + self.settings.cool_down
        clusters |= {h.model: Cluster(h.model, h.members, h.slot, quiet) for h in halves}
        placed = {*first.members, *second.members}
        lost = dict.fromkeys((d for d in parent.members if d not in placed), parent.id)
        state = dataclasses.replace(
            state, clusters=clusters, tree={**state.tree, node.id: node}, unplaced={**state.unplaced, **lost}
        )
        sizes = [len(first.members), len(second.members)]
        info = {"cluster": parent.id, "children": list(node.children), "sizes": sizes, **detail}
        return state, (Event(round_, "split", info),)

    def _place_newcomers(self, state: CflState, given: list[Contribution], round_: int) -> Step:
        """Alg. 4: each newcomer goes one edge down; at a leaf it becomes a member."""
        events = []
        for update in given:
            node = state.unplaced.get(update.device)
            if node is None or update.model != node or update.vector is None:
                continue
            child = cfl_tree.follow(state.tree[node], update)
            if child in state.tree:
                state = dataclasses.replace(state, unplaced={**state.unplaced, update.device: child})
                continue
            leaf = state.clusters[child]
            if child in state.trials:
                continue
            leaf = dataclasses.replace(leaf, members=(*leaf.members, update.device))
            unplaced = {d: n for d, n in state.unplaced.items() if d != update.device}
            state = dataclasses.replace(state, unplaced=unplaced, clusters={**state.clusters, child: leaf})
            events.append(Event(round_, "newcomer", {"device": update.device, "cluster": child}))
        return state, tuple(events)

    def final(self, state: CflState, round_: int, devices: tuple[str, ...]) -> RoundPlan:
        """Every device takes its cluster's model; one that is not placed yet takes its node's."""
        models = {c.id: c.slot for c in state.clusters.values()}
        orders = {d: final_order((c.id,)) for c in state.clusters.values() for d in c.members}
        for device, node in state.unplaced.items():
            models[node] = state.tree[node].slot
            orders[device] = final_order((node,))
        return RoundPlan(round_, models, {d: o for d, o in orders.items() if d in devices}, final=True)

    def dump(self, state: CflState) -> Dump:
        """Return the state as the store keeps it."""
        return cfl_state.dump(state)

    def load(self, document: Mapping[str, Any], vectors: Mapping[str, Float32Vector], fetch: Fetch) -> CflState:
        """Return the state that `dump` described."""
        return cfl_state.load(document, vectors, fetch)
