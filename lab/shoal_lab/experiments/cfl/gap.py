"""cfl-gap-samples and cfl-gap-rounds: the separation gap of hidden groups (Sattler et al., section VI-A, Figs. 5 and 6).

Twenty devices, four groups, two labels swapped in each; plain federated learning, three local epochs. The separation gap (cfl
Def. 2) is computed on a round's masked updates, as the aggregator receives them, and also on the full gradients at the model
that the round starts from. Above zero, the best bipartition cuts no group. Below zero it may also cut none (Remark 2 holds in
one direction only), so this is reported as well. The paper shows one curve each; ours is the mean of ``--set trials=T`` splits.

cfl-congruence: do norms tell congruent from incongruent devices? (Sattler et al., section VI-B, Fig. 7, Eqs 32 and 33).

Two devices and plain federated learning. Congruent: one holds the digits 0 to 4, the other 5 to 9. Incongruent: both hold random
images, and each swaps two labels of its own. Reported over the rounds are the norm of the mean and the larger of the two
devices' norms, of the updates (the quantities of CFL's test) and, every few rounds, of the full gradients at the same model.

The paper gives each device half of the training images; the default of ``--samples`` is far smaller here, to suit two cores.
A model can memorise a few images, which in the end makes even swapped labels congruent; the result shows whether it did.

cfl-noise: the chance of a right bipartition (Sattler et al., section II, Fig. 3, Eqs 30 and 31).

k true gradients in d = 100 dimensions and the noise of m = 3k devices are drawn from normal distributions. The paper leaves two
details open. Here the true gradients are centred, since they add up to zero at a stationary point (its Eq. 11), and the noise of
a draw is scaled so that the largest relative noise of a device (Eq. 16) equals gamma. There are no devices and no training; the
bipartition is the aggregator's own. Counted are draws with a positive separation gap, as in the paper's Fig. 3, and draws whose
bipartition cuts no group, which is all that CFL needs.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray

from aggregator.numerics.gap import overlap
from edge_client.learning.update import BatchOrder
from shoal.errors import UsageError
from shoal.protocol.messages import Share
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
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


def congruence(study: Study, options: Options, progress: Progress) -> Result:
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


DEVICES_PER_GROUP: Final = 3
GROUPS: Final = {"default": (2, 3, 5, 10, 20), "paper": (2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 50)}
GAMMAS: Final = {
    "default": (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0),
    "paper": tuple(round(0.1 * i, 1) for i in range(1, 31)),
}


def draw(k: int, gamma: float, dimensions: int, rng: np.random.Generator) -> tuple[NDArray[np.float32], list[int]]:
    """Return the gradients of 3k devices, (3k, d) float32, and their groups.

    Args:
        k: groups.
        gamma: the largest relative noise of a device (cfl Eq. 16).
        dimensions: d.
        rng: draws.
    """
    true = rng.standard_normal((k, dimensions))
    true -= true.mean(0)
    groups = np.repeat(np.arange(k), DEVICES_PER_GROUP)
    noise = rng.standard_normal((len(groups), dimensions))
    relative = np.linalg.norm(noise, axis=1) / np.linalg.norm(true[groups], axis=1)
    noise *= gamma / relative.max()
    return (true[groups] + noise).astype(np.float32), groups.tolist()


def chance(k: int, gamma: float, trials: int, dimensions: int, seed: int) -> tuple[float, float]:
    """Return the shares of ``trials`` draws with a positive gap, and with a bipartition that cuts no group."""
    # A stream for each point, so that a point's result does not depend on the grid.
    rng = np.random.default_rng([seed, k, round(gamma * 1000)])
    found = []
    for _ in range(trials):
        rows, groups = draw(k, gamma, dimensions, rng)
        found.append(gap_of(list(rows), groups))
    return float(np.mean([g.gap > 0 for g in found])), float(np.mean([g.right for g in found]))


def guaranteed(k: int, gamma: float) -> bool:
    """Return whether Theorem 1 guarantees a right bipartition if every device has relative noise ``gamma``."""
    if gamma >= 1.0:
        return False
    alike = overlap(gamma, gamma)
    return alike - cross_max_bound(k, alike) > 0


def cross_max_bound(k: int, alike: float) -> float:
    """Return the upper bound of cfl Eq. 19 on the similarity across the best bipartition of k groups with an overlap."""
    angle = math.pi / (k - 1)
    if alike < math.cos(angle):
        return 1.0
    return math.cos(angle) * alike + math.sin(angle) * math.sqrt(1.0 - alike**2)


def noise_chances(study: Study, options: Options, progress: Progress) -> Result:
    """Run ``cfl-noise``."""
    trials, dimensions = options.values["trials"], options.values["dimensions"]
    if trials < 1 or dimensions < 2:
        raise UsageError(f"{trials} trials in {dimensions} dimensions")
    points = [(k, gamma) for k in GROUPS[options.grid] for gamma in GAMMAS[options.grid]]
    history: list[dict[str, Any]] = []
    begin_s = time.process_time()
    for k, gamma in points:
        positive, right = chance(k, gamma, trials, dimensions, options.seed)
        history.append({"k": k, "gamma": gamma, "chance": positive, "right": right, "guaranteed": guaranteed(k, gamma)})
        progress.round("cfl", len(history), len(points), history[-1])
    beyond = [row for row in history if row["k"] >= 10 and row["gamma"] >= 1.0]
    return study.result(
        options,
        {
            "devices": f"{DEVICES_PER_GROUP} k",
            "gamma": "of the noisiest device",
            "true_gradients": "normal, centred",
            "grid": options.grid,
            "mask": "nothing leaves a device",
        },
        accuracy=None,
        clusters=2,
        cpu_seconds_per_round=time.process_time() - begin_s,
        history=history,
        extra={
            "gamma_limit": {str(k): largest_gamma(history, k) for k in GROUPS[options.grid]},
            "guaranteed_wrong": sum(row["guaranteed"] and row["right"] < 1.0 for row in history),
            "least_chance_k10_gamma1": min((row["chance"] for row in beyond if row["gamma"] == 1.0), default=None),
        },
    )


def largest_gamma(history: list[dict[str, Any]], k: int) -> float | None:
    """Return the largest gamma up to which at least 95% of the draws with ``k`` groups have a positive gap."""
    limit = None
    for row in sorted((r for r in history if r["k"] == k), key=lambda r: float(r["gamma"])):
        if row["chance"] < 0.95:
            break
        limit = float(row["gamma"])
    return limit
