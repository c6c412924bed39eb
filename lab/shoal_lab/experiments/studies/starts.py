"""Figures of a run of Ghosh et al., sections 6.2 and 6.3: the last round, the random starts, and changes of the broadcast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aggregator.strategies.base import Event
from shoal.simulation.engine.metrics import adjusted_rand, purity
from shoal.simulation.engine.simulate import SimResult


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
