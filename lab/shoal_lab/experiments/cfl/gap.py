"""cfl-gap-samples and cfl-gap-rounds: the separation gap of hidden groups (Sattler et al., section VI-A, Figs. 5 and 6).

Twenty devices, four groups, two labels swapped in each; plain federated learning, three local epochs. The separation gap (cfl
Def. 2) is computed on a round's masked updates, as the aggregator receives them, and also on the full gradients at the model
that the round starts from. Above zero, the best bipartition cuts no group. Below zero it may also cut none (Remark 2 holds in
one direction only), so this is reported as well. The paper shows one curve each; ours is the mean of ``--set trials=T`` splits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.protocol.documents import LocalSettings
from shoal.task.manifest import LocalTraining
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study

if TYPE_CHECKING:
    from shoal.simulation.engine.simulate import Observation
    from shoal.simulation.engine.workforce import Workforce
    from shoal_lab.experiments.data.datasets import Dataset

DEVICES: Final = 20
GROUPS: Final = 4
EPOCHS: Final = 3
BATCH: Final = 100
ROUNDS: Final = 50
LR: Final = 0.1
HIDDEN: Final = 100
TRIALS: Final = 3
SEED_STEP: Final = 1000
"""Difference between the seeds of two trials."""
SAMPLES: Final[Mapping[str, Mapping[str, tuple[int, ...]]]] = {
    "mnist": {"default": (10, 20, 50, 100, 200), "paper": (10, 20, 30, 40, 60, 80, 100, 125, 150, 175, 200)},
    "cifar10": {"default": (100, 500, 1000, 2400), "paper": (100, 300, 500, 700, 900, 1200, 1500, 1800, 2100, 2400)},
}
ROUNDS_SAMPLES: Final = {"cifar10": 1500}
"""Samples per device in cfl-gap-rounds, by data set; 100 for others."""
KNOBS: Final = ("dataset", "model", "lr", "momentum", "hidden", "trials", "points")
KINDS: Final = ("updates", "gradients")
GRADIENT: Final = LocalSettings(
    epochs=0, steps=1, batch_size=0, lr=1024.0, lr_decay=1.0, momentum=0.0, clip=0.0, prox_mu=0.0
)
"""One step on all samples with step size 1024, so that float32 does not round the gradient away beside the model."""
SAMPLES_PUBLISHED: Final[Mapping[str, Any]] = {
    "mnist": "positive from 20 samples a device with updates; grows with the samples; updates above gradients",
    "cifar10": "positive from about 500 samples a device",
}
ROUNDS_PUBLISHED: Final[Mapping[str, Any]] = {
    "mnist": "positive from about 10 rounds with updates; grows with the rounds; updates above gradients",
    "cifar10": "positive from about 10 rounds",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Gap:
    """One kind of vectors in one round: the gap's parts, and whether the best bipartition cuts no group."""

    intra_min: float
    cross_max: float
    right: bool

    @property
    def gap(self) -> float:
        """g(alpha), cfl Eq. 28."""
        return self.intra_min - self.cross_max


def gap_of(rows: Sequence[NDArray[np.float32]], groups: Sequence[int]) -> Gap:
    """Return the separation gap of vectors, (d,) each, whose devices' groups are known."""
    from aggregator.numerics.bipartition import bipartition
    from aggregator.numerics.gap import separation_gap
    from aggregator.numerics.similarity import cosine_matrix

    similarity = cosine_matrix(list(rows))
    found, cut = separation_gap(similarity, groups), bipartition(similarity)
    sides = [{groups[i] for i in side} for side in (cut.left, cut.right)]
    return Gap(found.intra_min, found.cross_max, not sides[0] & sides[1])


def gradients(workforce: Workforce, theta: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return every device's full gradient at ``theta`` (d,), shape (m, d), float32, up to one factor."""
    import torch

    from edge_client.learning.update import BatchOrder
    from shoal.protocol.messages import Share
    from shoal.simulation.trainers.blocks import Shelf

    shelf: Shelf = workforce.shelf(Share.TRAIN)
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


@dataclasses.dataclass(slots=True)
class _Runs:
    """The common part of both experiments' trials."""

    options: Options
    progress: Progress
    data: Dataset
    seconds: list[float] = dataclasses.field(default_factory=list)

    def one(self, samples: int, rounds: int, trial: int, measured: Sequence[int]) -> dict[int, dict[str, Gap]]:
        """Return the gaps of the ``measured`` rounds of one trial."""
        from shoal.simulation.engine.simulate import simulate
        from shoal.simulation.shares import Shares
        from shoal_lab.experiments.cfl.networks import network_for
        from shoal_lab.experiments.common.paper import paper_options
        from shoal_lab.experiments.data import splits

        options, seed = self.options, self.options.seed + SEED_STEP * trial
        m = options.devices or DEVICES
        population = splits.label_swap(
            # Every sample is for training: nothing is tested here.
            self.data,
            devices=m,
            groups=GROUPS,
            samples=samples,
            seed=seed,
            shares=Shares(1.0, 0.0, 0.0),
        )
        watch = GapWatch(population.groups or (), measured)
        done = simulate(
            "fedavg",
            {},
            population,
            network_for(options.knob("model", "cnn"), self.data, options.knob("hidden", HIDDEN)),
            paper_options(
                rounds=rounds,
                local=local_of(options),
                seed=seed,
                mask=options.mask,
                evaluate_every=0,
                device=options.device,
                threads=options.threads,
                deferred=False,
            ),
            watch=watch,
        )
        self.seconds.append(done.cpu_seconds_per_round)
        return watch.found


def local_of(options: Options) -> LocalTraining:
    """Return the recipe of a round."""
    return LocalTraining(
        epochs=EPOCHS, batch_size=BATCH, lr=options.knob("lr", LR), momentum=options.knob("momentum", 0.0)
    )


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


def gap_samples(options: Options, progress: Progress) -> Result:
    """Run ``cfl-gap-samples``."""
    runs = _open(options, progress)
    rounds, trials = options.rounds or ROUNDS, _trials(options)
    points = _points(options)
    history: list[dict[str, Any]] = []
    for samples in points:
        gaps = [runs.one(samples, rounds, trial, [rounds])[rounds] for trial in range(trials)]
        history.append({"samples": samples, "round": rounds, **row_of(gaps)})
        progress.round("fedavg", len(history), len(points), history[-1])
    return _result("cfl-gap-samples", SAMPLES_PUBLISHED, runs, rounds, history, "samples", {"points": points})


def gap_rounds(options: Options, progress: Progress) -> Result:
    """Run ``cfl-gap-rounds``."""
    runs = _open(options, progress)
    rounds, trials = options.rounds or ROUNDS, _trials(options)
    samples = options.samples or ROUNDS_SAMPLES.get(runs.data.name, 100)
    found = []
    for trial in range(trials):
        found.append(runs.one(samples, rounds, trial, range(1, rounds + 1)))
        progress.round("fedavg", trial + 1, trials, None)
    history = [{"round": r, **row_of([f[r] for f in found])} for r in range(1, rounds + 1)]
    return _result("cfl-gap-rounds", ROUNDS_PUBLISHED, runs, rounds, history, "round", {"samples": samples})


def _trials(options: Options) -> int:
    trials = options.knob("trials", TRIALS)
    if trials < 1:
        raise UsageError(f"trials is a whole number of at least 1, not {trials}")
    return trials


def _points(options: Options) -> tuple[int, ...]:
    """Return the numbers of samples: those of --set points=10,20, the one of --samples, or the grid's."""
    from shoal_lab.experiments.ifca.images import counts

    if "points" in options.settings:
        return counts(options.settings["points"])
    if options.samples is not None:
        return (options.samples,)
    grids = SAMPLES["cifar10" if options.knob("dataset", "mnist") == "cifar10" else "mnist"]
    return grids["paper" if options.grid == "paper" else "default"]


def _open(options: Options, progress: Progress) -> _Runs:
    from shoal_lab.experiments.data import datasets

    unknown = options.strategy_settings(*KNOBS)
    if unknown:
        raise UsageError(f"the gap experiments have no setting {sorted(unknown)[0]!r}", hint=", ".join(KNOBS))
    name = options.knob("dataset", "mnist")
    progress.stage(f"reading {name}")
    return _Runs(options, progress, datasets.load(name, options.data_dir))


def _result(
    experiment: str,
    published: Mapping[str, Any],
    runs: _Runs,
    rounds: int,
    history: list[dict[str, Any]],
    axis: str,
    more: Mapping[str, Any],
) -> Result:
    options, last = runs.options, history[-1]
    trials, name = _trials(options), runs.data.name
    return Result(
        experiment=experiment,
        algorithm="fedavg",
        accuracy=None,
        clusters=1,
        rounds=rounds,
        cpu_seconds_per_round=float(np.mean(runs.seconds)),
        published=published.get(name),
        history=history,
        parameters={
            "dataset": name,
            "model": options.knob("model", "cnn"),
            "devices": options.devices or DEVICES,
            "groups": GROUPS,
            "epochs": EPOCHS,
            "batch_size": BATCH,
            "lr": options.knob("lr", LR),
            "momentum": options.knob("momentum", 0.0),
            "rounds": rounds,
            "mask": options.mask,
            "seeds": [options.seed + SEED_STEP * t for t in range(trials)],
            **more,
        },
        extra={"gap": {kind: last[f"gap_{kind}"] for kind in KINDS}, "positive_from": positive_from(history, axis)},
    )


EXPERIMENTS: Final = (
    Study(
        id="cfl-gap-samples",
        paper="cfl, section VI-A, Fig. 5",
        title="separation gap over samples a device",
        algorithms=("fedavg",),
        published=SAMPLES_PUBLISHED,
        runner=gap_samples,
        needs=("mnist",),
        figure="gap",
    ),
    Study(
        id="cfl-gap-rounds",
        paper="cfl, section VI-A, Fig. 6",
        title="separation gap over rounds",
        algorithms=("fedavg",),
        published=ROUNDS_PUBLISHED,
        runner=gap_rounds,
        needs=("mnist",),
        figure="gap",
    ),
)
