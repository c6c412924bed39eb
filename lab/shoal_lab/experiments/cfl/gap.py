"""cfl-gap-samples and cfl-gap-rounds: the separation gap of hidden groups (Sattler et al., section VI-A, Figs. 5 and 6).

Twenty devices, four groups, two labels swapped in each; plain federated learning, three local epochs. The separation gap (cfl
Def. 2) is computed on a round's masked updates, as the aggregator receives them, and also on the full gradients at the model
that the round starts from. Above zero, the best bipartition cuts no group. Below zero it may also cut none (Remark 2 holds in
one direction only), so this is reported as well. The paper shows one curve each; ours is the mean of ``--set trials=T`` splits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from edge_client.learning.update import BatchOrder
from shoal.errors import UsageError
from shoal.protocol.messages import Share
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population
from shoal.simulation.engine.simulate import Observation, SimResult, SimRound, simulate
from shoal.simulation.engine.workforce import Workforce
from shoal.simulation.shares import Shares
from shoal.simulation.trainers.networks import Network
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study
from shoal_lab.experiments.common.paper import paper_options
from shoal_lab.experiments.data import datasets, splits
from shoal_lab.experiments.data.datasets import Dataset
from shoal_lab.experiments.studies.run import local_of
from shoal_lab.experiments.studies.tasks import network_for
from shoal_lab.experiments.studies.watch import Gap, gap_of

SEED_STEP: Final = 1000
"""Difference between the seeds of two trials."""
SAMPLES: Final[Mapping[str, Mapping[str, tuple[int, ...]]]] = {
    "mnist": {"default": (10, 20, 50, 100, 200), "paper": (10, 20, 30, 40, 60, 80, 100, 125, 150, 175, 200)},
    "cifar10": {"default": (100, 500, 1000, 2400), "paper": (100, 300, 500, 700, 900, 1200, 1500, 1800, 2100, 2400)},
}
ROUNDS_SAMPLES: Final = {"cifar10": 1500}
"""Samples per device in cfl-gap-rounds, by data set; 100 for others."""
KINDS: Final = ("updates", "gradients")
GRADIENT: Final = LocalTraining(
    epochs=0, steps=1, batch_size=0, lr=1024.0, lr_decay=1.0, momentum=0.0, clip=0.0, prox_mu=0.0
)
"""One step on all samples with step size 1024, so that float32 does not round the gradient away beside the model."""


def gradients(workforce: Workforce, theta: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return every device's full gradient at ``theta`` (d,), shape (m, d), float32, up to one factor."""
    shelf = workforce.shelf(Share.TRAIN)
    models = torch.from_numpy(theta[None]).to(workforce.device)
    names = workforce.population.names
    rows = np.empty((len(names), len(theta)), np.float32)
    with torch.no_grad():
        ids = np.arange(len(names))
        for part in shelf.parts(ids, workforce.trainer.limits(1, GRADIENT)):
            orders = [BatchOrder(workforce.run, names[int(p)], 1) for p in part]
            start = np.zeros(len(part), np.int64)
            done = workforce.trainer.train(models, start, shelf.block(part), orders, GRADIENT, 1)
            rows[part] = done.rows().cpu().numpy()
    return rows


class GapWatch:
    """Measures the separation gaps of chosen rounds.

    Args:
        groups: each device's true group.
        rounds: the rounds to measure.
    """

    def __init__(self, groups: Sequence[int], rounds: Sequence[int]) -> None:
        self.groups, self.rounds = tuple(groups), frozenset(rounds)
        self.found: dict[int, dict[str, Gap]] = {}

    def __call__(self, seen: Observation) -> None:
        """Measure one round."""
        if seen.round not in self.rounds:
            return
        (model,) = seen.plan.models  # federated averaging has one
        at = seen.workforce.theta(seen.plan, model)
        self.found[seen.round] = {
            "updates": gap_of([c.row for c in seen.contributions], self.groups),
            "gradients": gap_of(list(gradients(seen.workforce, at)), self.groups),
        }


def gaps_of(
    options: Options, data: Dataset, samples: int, trial: int, measured: Sequence[int], seconds: list[float]
) -> dict[int, dict[str, Gap]]:
    """Return the gaps of the ``measured`` rounds of one trial, and note its CPU time a round in ``seconds``."""
    values, seed = options.values, options.seed + SEED_STEP * trial
    # Every sample is for training: nothing is tested here.
    population = splits.relabelled(
        data,
        "swap",
        groups=values["groups"],
        samples=samples,
        seed=seed,
        shares=Shares(1.0, 0.0, 0.0),
        **options.of("devices"),
    )
    watch = GapWatch(population.groups or (), measured)
    done = watched_fedavg(options, seed, population, network_for(options, data), watch)
    seconds.append(done.cpu_seconds_per_round)
    return watch.found


def watched_fedavg(
    options: Options,
    seed: int,
    population: Population,
    network: Network,
    watch: Callable[[Observation], None],
    told: Callable[[SimRound], None] | None = None,
) -> SimResult:
    """Run federated averaging without tests, with each round's single updates for ``watch``."""
    sim_options = paper_options(
        rounds=options.rounds,
        local=local_of(options.values),
        seed=seed,
        mode=options.mask,
        evaluate_every=0,
        device=options.device,
        threads=options.threads,
        deferred=False,
    )
    return simulate("fedavg", {}, population, network, sim_options, told, watch=watch)


def row_of(gaps: Sequence[Mapping[str, Gap]]) -> dict[str, Any]:
    """Return a point of the history: of updates and of gradients the means over trials, and each trial's gap."""
    row: dict[str, Any] = {}
    for kind in KINDS:
        mine = [g[kind] for g in gaps]
        row[f"gap_{kind}"] = float(np.mean([g.gap for g in mine]))
        row[f"trials_{kind}"] = [g.gap for g in mine]
        row[f"intra_min_{kind}"] = float(np.mean([g.intra_min for g in mine]))
        row[f"cross_max_{kind}"] = float(np.mean([g.cross_max for g in mine]))
        row[f"right_{kind}"] = sum(g.right for g in mine)
    return row


def positive_from(history: Sequence[Mapping[str, Any]], axis: str) -> dict[str, dict[str, float | None]]:
    """Return, for both kinds, the first point from which on the mean gap, and every trial's gap, stays above zero."""
    found: dict[str, dict[str, float | None]] = {}
    for kind in KINDS:
        marks: dict[str, float | None] = {}
        for name, ok in (
            ("mean", [row[f"gap_{kind}"] > 0 for row in history]),
            ("every_trial", [min(row[f"trials_{kind}"]) > 0 for row in history]),
            ("right_bipartition", [row[f"right_{kind}"] == len(row[f"trials_{kind}"]) for row in history]),
        ):
            # The last point that fails decides, since the gap must stay positive from then on.
            last_bad = max((i for i, good in enumerate(ok) if not good), default=-1)
            marks[name] = history[last_bad + 1][axis] if last_bad + 1 < len(history) else None
        found[kind] = marks
    return found


def gap_samples(study: Study, options: Options, progress: Progress) -> Result:
    """Run ``cfl-gap-samples``."""
    data, rounds = _data(options, progress), options.rounds or 0
    seconds: list[float] = []
    grid = SAMPLES["cifar10" if options.values["dataset"] == "cifar10" else "mnist"][options.grid]
    points = [options.samples] if options.samples is not None else options.values["points"] or grid
    history: list[dict[str, Any]] = []
    for samples in points:
        gaps = [gaps_of(options, data, samples, trial, [rounds], seconds)[rounds] for trial in _trials(options)]
        history.append({"samples": samples, "round": rounds, **row_of(gaps)})
        progress.round("fedavg", len(history), len(points), history[-1])
    return _result(study, options, history, "samples", seconds, {"points": points})


def gap_rounds(study: Study, options: Options, progress: Progress) -> Result:
    """Run ``cfl-gap-rounds``."""
    data, rounds = _data(options, progress), range(1, (options.rounds or 0) + 1)
    seconds: list[float] = []
    found = []
    samples = options.samples or ROUNDS_SAMPLES.get(options.values["dataset"], 100)
    for trial in _trials(options):
        found.append(gaps_of(options, data, samples, trial, rounds, seconds))
        progress.round("fedavg", trial + 1, len(_trials(options)), None)
    history = [{"round": r, **row_of([f[r] for f in found])} for r in rounds]
    return _result(study, options, history, "round", seconds, {"samples": samples})


def _data(options: Options, progress: Progress) -> Dataset:
    progress.stage(f"reading {options.values['dataset']}")
    return datasets.load(options.values["dataset"], options.data_dir)


def _trials(options: Options) -> range:
    if (trials := options.values["trials"]) < 1:
        raise UsageError(f"trials is a whole number of at least 1, not {trials}")
    return range(trials)


def _result(
    study: Study,
    options: Options,
    history: list[dict[str, Any]],
    axis: str,
    seconds: Sequence[float],
    parameters: Mapping[str, Any],
) -> Result:
    return study.result(
        options,
        {"seeds": [options.seed + SEED_STEP * trial for trial in _trials(options)], **parameters},
        accuracy=None,
        clusters=1,
        cpu_seconds_per_round=float(np.mean(seconds)),
        history=history,
        extra={
            "gap": {kind: history[-1][f"gap_{kind}"] for kind in KINDS},
            "positive_from": positive_from(history, axis),
        },
    )
