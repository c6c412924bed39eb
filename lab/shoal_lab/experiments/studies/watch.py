"""What a run of a table is measured by, each a `shoal_lab.experiments.studies.run.Measure` beside a run that never sees it.

- `CflWatch` (``splits``): accuracies, separation gaps, and the outcome of every split.
- `Scores` (``best-round``): the score of Duan et al., section IV: the best round over the devices that have a group (see
  studies/fedgroup.toml). A round begins with the cold start of drawn devices that have no group yet, so early rounds test few
  devices; each row of the history reports the number.
- `Starts` (``starts``): the last round, the random starts and changes of the broadcast, for Ghosh et al., sections 6.2 and 6.3.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.backend import cosine_matrix
from aggregator.numerics.bipartition import bipartition
from aggregator.strategies.base import ClientUpdate, Event, RoundPlan, final_assignment
from aggregator.strategies.registry import make_strategy
from shoal.protocol.messages import Phase
from shoal.simulation.engine.evaluation import Evaluation, evaluate
from shoal.simulation.engine.metrics import adjusted_rand, purity
from shoal.simulation.engine.simulate import Observation, SimResult
from shoal.simulation.shares import statistics

LATER_ROUNDS: Final = 10
"""Rounds after a split at which accuracy is measured again."""
GAP_DECIMALS: Final = 4
MOST_NATS: Final = 700.0
"""Largest loss whose exponential is a finite float."""


class CflWatch:
    """A `shoal_lab.experiments.studies.run.Measure` that records every round of a run of ``cfl`` or ``fedavg``.

    Args:
        groups: each device's true group, in order of the devices.
        every: rounds between two tests on the test shares; a round with a split is always tested.
        splits: whether the run may split clusters, and the result reports them.
    """

    evaluate_every = 0

    def __init__(self, groups: Sequence[int], every: int = 1, *, splits: bool = True) -> None:
        self.groups = tuple(groups)
        self.every = every
        self.may_split = splits
        self.rows: list[dict[str, Any]] = []
        self.splits: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []
        self.merges: list[dict[str, Any]] = []
        self.moves: list[dict[str, Any]] = []
        self._seen: list[tuple[int, dict[str, float]]] = []
        self._opened: dict[int, int] = {}

    def __call__(self, seen: Observation) -> None:
        """Look at one round; a device that waits for its place in the tree belongs to no cluster."""
        names = seen.workforce.population.names
        group_of = dict(zip(names, self.groups, strict=True))
        label_of = {name: seen.outcome.clusters[name] for name in names if name in seen.outcome.clusters}
        labels, truth = list(label_of.values()), [group_of[name] for name in label_of]
        members: dict[int, list[str]] = defaultdict(list)
        for name, label in label_of.items():
            members[label].append(name)
        row: dict[str, Any] = {
            "round": seen.round,
            "accuracy": None,
            "loss": _loss(seen.contributions),
            "purity": purity(labels, truth),
            "ari": adjusted_rand(labels, truth),
            "clusters": len(members),
            "gaps": cluster_gaps(seen.contributions, group_of),
            "gap": None,
        }
        row["gap"] = min(row["gaps"].values(), default=None)
        # Counted from round 1, so that a split in round 2 has an accuracy to be compared with.
        due = self.every and (seen.round - 1) % self.every == 0
        if due or any(e.kind in ("split", "trial-opened", "merge") for e in seen.outcome.events):
            found = self._tested(seen)
            if found is not None:
                row["accuracy"] = found.accuracy
                each = (found.correct / found.tested).tolist()
                self._seen.append((seen.round, dict(zip(found.names, each, strict=True))))
                if seen.workforce.network.kind == "sequence":
                    row["perplexity"] = math.exp(min(found.loss, MOST_NATS))
        self.rows.append(row)
        for event in seen.outcome.events:
            self._note(event, group_of, members)

    def _tested(self, seen: Observation) -> Evaluation | None:
        """Test the models that devices would take now on their own test samples."""
        force = seen.workforce
        strategy = make_strategy(force.run, None, force.average)
        return evaluate(force, strategy.final(seen.state, seen.plan.round + 1, force.population.names), "assigned")

    def _note(self, event: Event, group_of: Mapping[str, int], members: Mapping[int, list[str]]) -> None:
        detail = dict(event.detail)
        if event.kind == "trial-opened":
            self._opened[detail["cluster"]] = event.round
        elif event.kind == "split-refused":
            # Refusing to split a cluster of several groups is a mistake, refusing to split a pure one is not.
            there = {group_of[name] for name in members[detail["cluster"]]}
            self.refused.append({"round": event.round, "impure": len(there) > 1, **detail})
        elif event.kind == "merge":
            self.merges.append({"round": event.round, **detail})
        elif event.kind == "moved":
            home = group_of[detail["device"]]
            kin = [sum(group_of[name] == home for name in members[detail[key]]) for key in ("from", "cluster")]
            self.moves.append({"round": event.round, **detail, "right": kin[1] - 1 > kin[0]})  # itself is there now
        elif event.kind == "split":
            sides = [members[child] for child in detail["children"]]
            truth = [{group_of[name] for name in side} for side in sides]
            self.splits.append(
                {
                    "round": event.round,
                    "opened": self._opened.get(detail["cluster"], event.round),
                    **detail,
                    "right": not truth[0] & truth[1],
                    "of_pure_cluster": len(truth[0] | truth[1]) == 1,
                    "devices": [*sides[0], *sides[1]],
                }
            )

    def latest(self) -> Mapping[str, Any]:
        """Return the last record."""
        return self.rows[-1] if self.rows else {}

    def figures(self, done: SimResult) -> dict[str, Any]:
        """Return the figures of the last record, and the perplexity where words are predicted."""
        last, extra = self.rows[-1], self.report() if self.may_split else {}
        if done.workforce.network.kind == "sequence":
            perplexity = None if done.final is None else math.exp(min(done.final.loss, MOST_NATS))
            extra = {"perplexity": perplexity, **extra}
        return {
            "accuracy": None if done.final is None else done.final.accuracy,
            "clusters": last["clusters"],
            "history": self.rows,
            "purity": last["purity"],
            "ari": last["ari"],
            "extra": extra,
        }

    def split_report(self) -> list[dict[str, Any]]:
        """Return every split with the accuracy, percent, of its devices: before, right after, and some rounds later."""
        report = []
        for split in self.splits:
            entry = {k: v for k, v in split.items() if k != "devices"}
            at_once = split["opened"] == split["round"]
            before = [a for r, a in self._seen if r < split["opened"] or (r == split["opened"] and not at_once)]
            after = [a for r, a in self._seen if r >= split["round"]]
            later = [a for r, a in self._seen if r >= split["round"] + LATER_ROUNDS]
            for name, chosen in (("before", before[-1:]), ("after", after[:1]), ("later", later[:1])):
                entry[f"accuracy_{name}"] = _mean(chosen[0], split["devices"]) if chosen else None
            report.append(entry)
        return report

    def partition_round(self) -> int | None:
        """Return the first round from which on the clusters are the true groups until the end; None if never."""
        # The last round with a wrong clustering decides: earlier correct rounds did not last.
        wrong = max((row["round"] for row in self.rows if row["ari"] < 1.0), default=0)
        return wrong + 1 if self.rows and wrong < self.rows[-1]["round"] else None

    def report(self) -> dict[str, Any]:
        """Return everything about the clustering that belongs in a result's data."""
        found, splits = self.partition_round(), self.split_report()
        return {
            "splits": splits,
            "split_log": [_sentence(s) for s in splits],
            "trials_refused": len(self.refused),
            "trials_refused_of_impure_clusters": sum(r["impure"] for r in self.refused),
            "merges": self.merges,
            "moves": self.moves,
            "devices_moved": len(self.moves),
            "wrong_moves": sum(not m["right"] for m in self.moves),
            "pure_clusters_split": sum(s["of_pure_cluster"] for s in self.splits),
            "wrong_splits": sum(not s["right"] and not s["of_pure_cluster"] for s in self.splits),
            "true_partition": found is not None,
            "true_partition_from_round": found,
            "rounds_after_partition": None if found is None else self.rows[-1]["round"] - found,
        }


@dataclass(frozen=True, slots=True)
class Gap:
    """The separation gap of known groups (cfl Def. 2).

    Attributes:
        intra_min: least similarity of two devices of one group; 1 if every group has one device.
        cross_max: largest similarity across the best bipartition.
        right: whether that cuts no group.
    """

    intra_min: float
    cross_max: float
    right: bool

    @property
    def gap(self) -> float:
        """g(alpha), cfl Eq. 28: if it is above zero, the best bipartition cuts no group."""
        return self.intra_min - self.cross_max


def gap_of(rows: Sequence[NDArray[np.float32]], groups: Sequence[int]) -> Gap:
    """Return the separation gap of vectors, (d,) each, whose devices' groups are known."""
    similarity, labels = cosine_matrix(list(rows)), np.asarray(groups)
    cut = bipartition(similarity)
    together = labels[:, None] == labels[None, :]
    np.fill_diagonal(together, False)
    sides = [{groups[i] for i in side} for side in (cut.left, cut.right)]
    return Gap(float(similarity.min(where=together, initial=1.0)), cut.cross_max, not sides[0] & sides[1])


def cluster_gaps(contributions: Sequence[ClientUpdate], group_of: Mapping[str, int]) -> dict[str, float]:
    """Return the separation gap (cfl Def. 2) of each cluster's updates of this round, by the cluster's id.

    Clusters on trial, or of fewer than two devices, have none.
    """
    rows: dict[int, list[ClientUpdate]] = defaultdict(list)
    for c in contributions:
        if c.phase is Phase.TRAIN and c.vector is not None and c.norm > 0:
            rows[c.model].append(c)
    gaps = {
        m: gap_of([c.row for c in mine], [group_of[c.device] for c in mine])
        for m, mine in rows.items()
        if len(mine) > 1
    }
    return {str(model): round(gaps[model].gap, GAP_DECIMALS) for model in sorted(gaps)}


def _sentence(split: Mapping[str, Any]) -> str:
    names = ("before", "after", "later")
    found = [f"{split[f'accuracy_{n}']:.1f} % {n}" for n in names if split[f"accuracy_{n}"] is not None]
    kind = "right" if split["right"] else "of one group" if split["of_pure_cluster"] else "wrong"
    sizes = " + ".join(map(str, split["sizes"]))
    return f"round {split['round']}: {sizes} devices ({kind}), {', '.join(found)}"


def _loss(contributions: Sequence[ClientUpdate]) -> float:
    training = [c for c in contributions if c.vector is not None]
    return float(np.average([c.loss for c in training], weights=[c.samples for c in training])) if training else np.nan


def _mean(accuracies: Mapping[str, float], devices: Sequence[str]) -> float:
    """Return the mean of ``devices``, percent."""
    return 100.0 * float(np.mean([accuracies[d] for d in devices]))


MOST: Final = 0.95


class Scores:
    """A `shoal_lab.experiments.studies.run.Measure` that tests, in every counted round, the devices that were ever assigned.

    Args:
        everybody: test all devices from the first round on.
        every: rounds between two tests; rounds: the last of them is always tested.
    """

    evaluate_every = 0

    def __init__(self, *, everybody: bool, every: int, rounds: int) -> None:
        self._everybody, self._every, self._rounds = everybody, max(1, every), rounds
        self._met: set[str] = set()
        self.rows: dict[int, dict[str, Any]] = {}
        self.cold_start: Mapping[str, Any] | None = None

    def __call__(self, seen: Observation) -> None:
        """Look at one round."""
        self._met |= {c.device for c in seen.contributions}
        for event in seen.outcome.events:
            if event.kind == "cold-start":
                self.cold_start = dict(event.detail)
        if seen.round == 0:
            return
        row: dict[str, Any] = {}
        norms = [c.norm for c in seen.contributions if c.phase is Phase.TRAIN]
        if norms:
            row["discrepancy"] = sum(norms) / len(norms)
        for event in seen.outcome.events:
            if event.kind == "discrepancy" and "mean_after" in event.detail:
                row["discrepancy_after"] = event.detail["mean_after"]
        if seen.round == self._rounds or seen.round % self._every == 0:
            found = self._test(seen)
            if found is not None:
                row |= {"accuracy": found.accuracy, "tested": len(found.names)}
        self.rows[seen.round] = row

    def latest(self) -> Mapping[str, Any]:
        """Return the accuracy of the last tested round."""
        tested = [row["accuracy"] for row in self.rows.values() if "accuracy" in row]
        return {"accuracy": tested[-1]} if tested else {}

    def figures(self, done: SimResult) -> dict[str, Any]:
        """Return the figures of the round with the best accuracy, and beside them those of the last one."""
        history = [{**closed.as_dict(), "accuracy": None, **self.rows.get(closed.round, {})} for closed in done.history]
        tested = [row for row in history if row["accuracy"] is not None]
        best = max(tested, key=lambda row: row["accuracy"], default=None)  # the paper's early stopping
        final = done.history[-1]
        extra: dict[str, Any] = {"population": statistics(done.workforce.population), "sizes": final.sizes}
        if best is not None:
            extra |= {"best_round": best["round"], "best_tested": best["tested"], "last_tested": tested[-1]["tested"]}
            extra["best_of_most_tested"] = best_of_most(tested)
        if self.cold_start is not None:
            extra["cold_start"] = self.cold_start
        return {
            "accuracy": None if best is None else best["accuracy"],
            "accuracy_last": tested[-1]["accuracy"] if tested else None,
            "clusters": final.clusters,
            "history": history,
            "purity": final.purity,
            "ari": final.ari,
            "extra": extra,
        }

    def _test(self, seen: Observation) -> Evaluation | None:
        strategy = make_strategy(seen.workforce.run, None, seen.workforce.average)
        names = seen.workforce.population.names
        devices = names if self._everybody else tuple(d for d in names if d in self._met)
        final = strategy.final(seen.state, seen.plan.round + 1, devices)
        return evaluate(seen.workforce, decided(final, seen.outcome.clusters), "assigned")


def decided(final: RoundPlan, clusters: Mapping[str, int]) -> RoundPlan:
    """Return the final round with each device's order limited to its cluster's model, so that IFCA's devices don't re-choose."""
    assignments = {
        d: assignment if len(assignment.candidates) == 1 else final_assignment((assignment.candidates[clusters[d]],))
        for d, assignment in final.assignments.items()
    }
    return dataclasses.replace(final, assignments=assignments)


def best_of_most(tested: list[dict[str, Any]]) -> float:
    """Return the highest accuracy of the rounds that tested at least 95 % of the devices that the last one tested."""
    enough = MOST * tested[-1]["tested"]
    return max(float(row["accuracy"]) for row in tested if row["tested"] >= enough)


class Starts:
    """A `shoal_lab.experiments.studies.run.Measure` of what the simulator evaluates every ``evaluate_every`` rounds.

    With ``clusters`` it also measures how pure these are.
    """

    def __init__(self, evaluate_every: int, *, clusters: bool) -> None:
        self.evaluate_every, self.clusters = evaluate_every, clusters

    def latest(self) -> Mapping[str, Any]:
        """Return nothing: the simulator's records have all figures of a round."""
        return {}

    def figures(self, done: SimResult) -> dict[str, Any]:
        """Return the figures of the last round, and beside them those of the starts and of IFCA's clusters."""
        last, population, extra = done.history[-1], done.workforce.population, starts_of(done.events)
        if "starts" in extra:
            extra["restart_rounds"] = done.restart_rounds
        if self.clusters:
            if population.groups is not None:
                extra["pure_from_round"] = pure_from([(r.round, r.purity) for r in done.history])
            if done.final is not None and population.probe_groups is not None:
                taken, truth = done.final.models.tolist(), population.probe_groups
                extra["identity_test"] = {"purity": purity(taken, truth), "ari": adjusted_rand(taken, truth)}
        return {
            "accuracy": None if done.final is None else done.final.accuracy,
            "clusters": last.clusters,
            "history": [r.as_dict() | {"sizes": r.sizes} for r in done.history],
            "purity": last.purity,
            "ari": last.ari,
            "extra": {**extra, "best_accuracy": done.best_accuracy},
        }


def starts_of(events: Sequence[tuple[int, Event]]) -> dict[str, Any]:
    """Return the outcome of each random start, and the rounds in which the broadcast changed, if there are any."""
    ended = [dict(event.detail) for _, event in events if event.kind == "start-ended"]
    kept = [int(event.detail["start"]) for _, event in events if event.kind == "start-kept"]
    changed = [{"round": n, "kind": event.kind} for n, event in events if event.kind.startswith("broadcast-")]
    starts = {"starts": ended, "start_kept": kept[-1] if kept else None} if ended else {}
    return starts | ({"broadcasts": changed} if changed else {})


def pure_from(purities: Sequence[tuple[int, float | None]]) -> int | None:
    """Return the first round from which on the clusters are pure until the end; None if they are not."""
    wrong = max((number for number, found in purities if found is not None and found < 1.0), default=0)
    return min((number for number, found in purities if found == 1.0 and number > wrong), default=None)
