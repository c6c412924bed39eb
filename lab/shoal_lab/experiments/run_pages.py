"""The fleet page of simulated runs: `shoal simulate --report`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from aggregator.rounds.closing import sampled_cosines
from aggregator.rounds.state import cluster_losses
from shoal.page.history import RunHistory
from shoal.page.page import MOST_RUNS, write_still

if TYPE_CHECKING:
    from shoal.simulation.engine.records import SimRound
    from shoal.simulation.engine.watching import Observation
    from shoal.simulation.engine.workforce import Workforce

FIGURES: Final = {
    "purity": "Purity of the clusters",
    "ari": "Agreement with the true groups (ARI)",
    "published": "Published",
}
"""Figures of a result that the page shows beside the last round's, with their names there."""


class RunRecorder:
    """Turns the rounds of simulated runs into the page's histories; give `round_closed` to `watched_by`.

    Of a run with several starts (IFCA) the history is that of the start that was kept.

    Attributes:
        runs: the histories of the first MOST_RUNS runs.
        seen: number of all runs.
    """

    def __init__(self) -> None:
        self.runs: list[RunHistory] = []
        self.seen = 0
        self._workforce: Workforce | None = None
        self._starts: list[RunHistory] = []

    def round_closed(self, observation: Observation, closed: SimRound | None) -> None:
        """Add a round of the run that is simulated now."""
        if observation.workforce is not self._workforce:
            self._begin(observation.workforce)
        if closed is not None and self.seen <= MOST_RUNS:
            if closed.round <= self.runs[-1].closed:
                self.runs[-1] = self._started(observation.workforce)
            self.runs[-1].add(_record(observation, closed))
        kept = next((e.detail["start"] for e in observation.outcome.events if e.kind == "start-kept"), None)
        if kept is not None and kept < len(self._starts) and self.seen <= MOST_RUNS:
            self.runs[-1] = self._starts[kept]

    def _begin(self, workforce: Workforce) -> None:
        self._workforce, self._starts = workforce, []
        self.seen += 1
        if self.seen <= MOST_RUNS:
            self.runs.append(self._started(workforce))

    def _started(self, workforce: Workforce) -> RunHistory:
        plan = workforce.run
        name = plan.recipe.algorithm if self.seen == 1 else f"{self.seen}: {plan.recipe.algorithm}"
        run = RunHistory(name=name, algorithm=plan.recipe.algorithm, rounds=plan.recipe.rounds)
        self._starts.append(run)
        return run


def write_page(path: Path, title: str, recorder: RunRecorder, results: Sequence[Mapping[str, Any]], note: str) -> None:
    """Write the page of an experiment's runs.

    Args:
        path: the file.
        title: the experiment's name.
        recorder: has the runs; if there are none, each result's own history is drawn.
        results: in the form of `Result.data`.
        note: a sentence about the experiment.

    Raises:
        ConfigError: the file can't be written.
    """
    runs = recorder.runs or [_from_result(result) for result in results]
    last = {run.algorithm: run for run in runs}
    for result in results:
        figures = [(words, text) for name, words in FIGURES.items() if (text := _text(result.get(name)))]
        if result["algorithm"] in last:
            last[result["algorithm"]].results = figures
    for run in runs:
        run.finished = True
    more = f" The first {MOST_RUNS} of {recorder.seen} runs." if recorder.seen > MOST_RUNS else ""
    write_still(path, title, [run.document() for run in runs], note=f"A simulation: {note}.{more}")


def _record(observation: Observation, closed: SimRound) -> dict[str, Any]:
    """Return a simulated round in the form of the aggregator's records; it has no messages, so no times and bytes."""
    given, clusters = list(observation.contributions), observation.outcome.clusters
    counted = [c for c in given if c.device not in closed.refused_norm]
    cosines = sampled_cosines(counted, clusters)
    return {
        "round": closed.round,
        "ordered": len(observation.plan.assignments),
        "contributed": len(given),
        "loss": closed.loss,
        "accuracy": None if closed.accuracy is None else closed.accuracy / 100,
        "norms": {c.device: c.norm for c in given},
        "clusters": clusters,
        "cluster_losses": cluster_losses(counted, clusters, observation.workforce.run),
        "refused_norm": closed.refused_norm,
        "events": [{"kind": e.kind, **e.detail} for e in closed.events],
        "cosines": None if cosines is None else {"devices": cosines.devices, "hundredths": cosines.hundredths},
    }


def _from_result(result: Mapping[str, Any]) -> RunHistory:
    run = RunHistory(name=str(result["algorithm"]), algorithm=str(result["algorithm"]), rounds=int(result["rounds"]))
    for row in result["history"]:
        number, accuracy = row.get("round"), row.get("accuracy")
        if isinstance(number, int) and number > run.closed:
            run.add({"round": number, "loss": row.get("loss"), "accuracy": accuracy and accuracy / 100})
    return run


def _text(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return ""
    return f"{value:.3g}"
