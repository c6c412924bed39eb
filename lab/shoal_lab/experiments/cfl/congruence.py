"""cfl-congruence: do norms tell congruent from incongruent devices? (Sattler et al., section VI-B, Fig. 7, Eqs 32 and 33).

Two devices and plain federated learning. Congruent: one holds the digits 0 to 4, the other 5 to 9. Incongruent: both hold random
images, and each swaps two labels of its own. Reported over the rounds are the norm of the mean and the larger of the two
devices' norms, of the updates (the quantities of CFL's test) and, every few rounds, of the full gradients at the same model.

The paper gives each device half of the training images; the default of ``--samples`` is far smaller here, to suit two cores.
A model can memorise a few images, which in the end makes even swapped labels congruent; the result shows whether it did.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Final

import numpy as np

from shoal.errors import UsageError
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine.simulate import Observation, SimRound
from shoal.simulation.shares import Shares
from shoal_lab.experiments.cfl.gap import GRADIENT, gradients, watched_fedavg
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study
from shoal_lab.experiments.data import datasets, splits
from shoal_lab.experiments.data.datasets import Dataset
from shoal_lab.experiments.studies.tasks import network_for

CASES: Final = ("incongruent", "congruent")
HALF: Final = 5
"""Digits of the first congruent device."""
TAIL: Final = 0.1
"""Share of the rounds, at the end, that the summary is taken over."""


def population_of(case: str, data: Dataset, samples: int, seed: int) -> Population:
    """Return the two devices of a case.

    Raises:
        UsageError: there are too few images.
    """
    if case == "incongruent":
        return splits.relabelled(
            data, "swap", devices=2, groups=2, samples=samples, seed=seed, shares=Shares(1.0, 0.0, 0.0)
        )
    rng = np.random.default_rng([seed, 3])
    x = data.x_train.reshape(len(data.x_train), -1)
    shards = []
    for mine in (data.y_train < HALF, data.y_train >= HALF):
        rows = rng.permutation(np.flatnonzero(mine))
        if samples > len(rows):
            raise UsageError(f"{samples} images of five digits: there are {len(rows)}")
        shards.append(Shard(x[rows[:samples]], data.y_train[rows[:samples]]))
    return Population(tuple(shards), groups=(0, 0))


@dataclasses.dataclass(slots=True)
class NormWatch:
    """Records the norms of Eqs 32 and 33, of updates in every round and of gradients every ``gradients_every`` rounds."""

    gradients_every: int
    rows: list[dict[str, float]] = dataclasses.field(default_factory=list)

    def __call__(self, seen: Observation) -> None:
        """Look at one round."""
        row = _norms(np.stack([c.row for c in seen.contributions]), "updates")
        row["loss"] = float(np.mean([c.loss for c in seen.contributions]))
        if self.gradients_every and (seen.round - 1) % self.gradients_every == 0:
            (model,) = seen.plan.models
            found = gradients(seen.workforce, seen.workforce.theta(seen.plan, model)) / np.float32(GRADIENT.lr)
            row |= _norms(found, "gradients")
        self.rows.append(row)


def _norms(rows: np.ndarray, kind: str) -> dict[str, float]:
    rows = rows.astype(np.float64)
    return {
        f"mean_{kind}": float(np.linalg.norm(rows.mean(0))),
        f"largest_{kind}": float(np.linalg.norm(rows, axis=1).max()),
    }


def run(study: Study, options: Options, progress: Progress) -> Result:
    """Run ``cfl-congruence``: both cases."""
    data = datasets.load(options.values["dataset"], options.data_dir)
    samples, rounds, network = options.samples or 0, options.rounds or 0, network_for(options, data)
    watches, seconds = {}, []
    for place, case in enumerate(CASES):
        watches[case] = NormWatch(options.values["gradients_every"])

        def told(closed: SimRound, done: int = place * rounds) -> None:
            progress.round("fedavg", done + closed.round, len(CASES) * rounds, {"loss": closed.loss})

        dealt = population_of(case, data, samples, options.seed)
        done = watched_fedavg(options, options.seed, dealt, network, watches[case], told)
        seconds.append(done.cpu_seconds_per_round)
    return study.result(
        options,
        {"network": repr(network), "devices": 2},
        accuracy=None,
        clusters=1,
        cpu_seconds_per_round=float(np.mean(seconds)),
        history=[_row(r, watches) for r in range(rounds)],
        extra={f"at_the_end_{case}": summary(watch.rows) for case, watch in watches.items()},
    )


def _row(index: int, watches: Mapping[str, NormWatch]) -> dict[str, Any]:
    row: dict[str, Any] = {"round": index + 1}
    for case, watch in watches.items():
        for key, value in watch.rows[index].items():
            row[f"loss_{case}" if key == "loss" else f"norm_{case}_{key}"] = float(f"{value:.5g}")
    return row


def summary(rows: list[dict[str, float]]) -> dict[str, float | None]:
    """Return, for each norm, its mean over the last tenth of the rounds as a share of its largest value in the run."""
    tail = rows[-max(1, round(TAIL * len(rows))) :]
    found: dict[str, float | None] = {}
    for key in ("mean_updates", "largest_updates", "mean_gradients", "largest_gradients"):
        whole, last = ([row[key] for row in part if key in row] for part in (rows, tail))
        found[key] = float(np.mean(last) / max(whole)) if whole and last else None
    found["loss"] = float(np.mean([row["loss"] for row in tail]))
    return found
