"""Looking over CFL's shoulder: accuracies, separation gaps and the fate of every split, none of which it ever sees."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from aggregator.numerics.gap import separation_gap
from aggregator.numerics.similarity import cosine_matrix
from aggregator.strategies.base import Contribution, Event, Strategy
from aggregator.strategies.registry import make_strategy
from benchmarks.simulator.evaluation import evaluate
from benchmarks.simulator.metrics import adjusted_rand, purity
from benchmarks.simulator.simulate import Observation
from wire.messages import Phase

LATER_ROUNDS: Final = 10
"""Rounds after a split at which accuracy is looked at once more."""


class CflWatch:
    """Notes what happened in every round of a run of ``cfl`` or ``fedavg``.

    Args:
        groups: each device's true group, in order of the devices.
        evaluate_every: rounds between two looks at the test shares; a round with a split is always looked at.
    """

    def __init__(self, groups: Sequence[int], evaluate_every: int = 1) -> None:
        self.groups = tuple(groups)
        self.evaluate_every = evaluate_every
        self.rows: list[dict[str, Any]] = []
        self.splits: list[dict[str, Any]] = []
        self.refused: list[dict[str, Any]] = []
        self.merges: list[dict[str, Any]] = []
        self._strategy: Strategy | None = None
        self._seen: list[tuple[int, dict[str, float]]] = []
        self._opened: dict[int, int] = {}

    def __call__(self, seen: Observation) -> None:
        """Look at one round."""
        names = seen.workforce.population.names
        group_of = dict(zip(names, self.groups, strict=True))
        labels = [seen.outcome.clusters[name] for name in names]
        members: dict[int, list[str]] = defaultdict(list)
        for name, label in zip(names, labels, strict=True):
            members[label].append(name)
        row: dict[str, Any] = {
            "round": seen.round,
            "accuracy": None,
            "loss": _loss(seen.contributions),
            "purity": purity(labels, self.groups),
            "ari": adjusted_rand(labels, self.groups),
            "clusters": len(members),
            "gaps": cluster_gaps(seen.contributions, group_of),
        }
        due = self.evaluate_every and (seen.round - 1) % self.evaluate_every == 0
        if due or any(e.kind in ("split", "trial-opened", "merge") for e in seen.outcome.events):
            found = self._accuracies(seen)
            row["accuracy"] = 100.0 * found[0]
            self._seen.append((seen.round, found[1]))
        self.rows.append(row)
        for event in seen.outcome.events:
            self._note(event, group_of, members)

    def _accuracies(self, seen: Observation) -> tuple[float, dict[str, float]]:
        """Return the accuracy over all test samples, and each device's, of the models that devices would take now."""
        if self._strategy is None:
            self._strategy = make_strategy(seen.workforce.run, None, seen.workforce.average)
        final = self._strategy.final(seen.state, seen.plan.round + 1, seen.workforce.population.names)
        found = evaluate(seen.workforce, final, "assigned")
        if found is None:
            return float("nan"), {}
        each = dict(zip(found.names, (found.correct / found.tested).tolist(), strict=True))
        return found.accuracy / 100.0, each

    def _note(self, event: Event, group_of: Mapping[str, int], members: Mapping[int, list[str]]) -> None:
        detail = dict(event.detail)
        if event.kind == "trial-opened":
            self._opened[detail["cluster"]] = event.round
        elif event.kind == "split-refused":
            self.refused.append({"round": event.round, **detail})
        elif event.kind == "merge":
            self.merges.append({"round": event.round, **detail})
        elif event.kind == "split":
            sides = [[name for name in members[child]] for child in detail["children"]]
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

    def split_report(self) -> list[dict[str, Any]]:
        """Return every split with the accuracy, percent, of its devices: before, right after, and some rounds later."""
        report = []
        for split in self.splits:
            entry = {k: v for k, v in split.items() if k != "devices"}
            before = [a for r, a in self._seen if r < split["opened"]] or [a for r, a in self._seen[:1]]
            after = [a for r, a in self._seen if r >= split["round"]]
            later = [a for r, a in self._seen if r >= split["round"] + LATER_ROUNDS]
            for name, chosen in (("before", before[-1:]), ("after", after[:1]), ("later", later[:1])):
                entry[f"accuracy_{name}"] = _mean(chosen[0], split["devices"]) if chosen else None
            report.append(entry)
        return report

    def partition_round(self) -> int | None:
        """Return the first round from which on the clusters are the true groups until the end; None if never."""
        wrong = max((row["round"] for row in self.rows if row["ari"] < 1.0), default=0)
        return wrong + 1 if self.rows and wrong < self.rows[-1]["round"] else None

    def report(self) -> dict[str, Any]:
        """Return everything about the clustering that belongs in a result's data."""
        found = self.partition_round()
        return {
            "splits": self.split_report(),
            "refused": [{k: r[k] for k in ("round", "cluster", "sizes")} for r in self.refused],
            "merges": self.merges,
            "pure_clusters_split": sum(s["of_pure_cluster"] for s in self.splits),
            "wrong_splits": sum(not s["right"] and not s["of_pure_cluster"] for s in self.splits),
            "true_partition": found is not None,
            "true_partition_from_round": found,
            "rounds_after_partition": None if found is None else self.rows[-1]["round"] - found,
        }


def cluster_gaps(contributions: Sequence[Contribution], group_of: Mapping[str, int]) -> dict[str, float]:
    """Return the separation gap (cfl Def. 2) of each cluster's updates of this round, by the cluster's id.

    Clusters on trial, or of fewer than two devices, have none.
    """
    rows: dict[int, list[Contribution]] = defaultdict(list)
    for c in contributions:
        if c.phase is Phase.TRAIN and c.vector is not None and c.norm > 0:
            rows[c.model].append(c)
    return {
        str(model): separation_gap(cosine_matrix([c.row for c in mine]), [group_of[c.device] for c in mine]).gap
        for model, mine in sorted(rows.items())
        if len(mine) > 1
    }


def _loss(contributions: Sequence[Contribution]) -> float:
    training = [c for c in contributions if c.vector is not None]
    return float(np.average([c.loss for c in training], weights=[c.samples for c in training])) if training else np.nan


def _mean(accuracies: Mapping[str, float], devices: Sequence[str]) -> float:
    """Return the mean of ``devices``, percent."""
    return 100.0 * float(np.mean([accuracies[d] for d in devices]))
