"""The score of Duan et al., section IV: the best round over the devices that have a group (see studies/fedgroup.toml).

A round begins with the cold start of drawn devices that have no group yet, so early rounds test few devices; each row of the
history reports the number.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

from aggregator.strategies.base import RoundPlan, final_assignment
from aggregator.strategies.registry import make_strategy
from shoal.protocol.messages import Phase
from shoal.simulation.engine.evaluation import Evaluation, evaluate
from shoal.simulation.engine.simulate import Observation, SimResult
from shoal.simulation.shares import statistics

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
