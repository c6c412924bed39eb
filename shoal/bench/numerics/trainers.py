"""The times of all trainers of dense networks over a grid of work, and the choice between them against the fastest.

Each case is a network, numbers of samples, a batch size, a number of epochs and a fleet. The trainers take turns on one
thread, and the least CPU time of each counts, from the models to the sum of the updates. ``--fit`` fits the costs of
`shoal.simulation.trainers.costs` to the times and prints them; a second fit leaves out every second case, and is judged by the
cases that it has not seen. Example: ``python -m shoal.bench.numerics.trainers --quick``.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray

from aggregator.numerics.checks import scipy_module
from shoal.protocol.documents import LocalSettings
from shoal.simulation.data import Shard
from shoal.simulation.engine.threads import limited_threads
from shoal.simulation.trainers.blocks import Shelf
from shoal.simulation.trainers.costs import TERMS, Work, fits, seconds
from shoal.simulation.trainers.dense import Dense
from shoal.simulation.trainers.networks import Linear, OneHidden, Softmax, origins
from shoal.simulation.trainers.registry import Fastest

NETWORKS: Final[Mapping[str, Dense]] = {
    "linear 300": Linear(300),
    "softmax 64-10": Softmax(64, 10),
    "softmax 784-10": Softmax(784, 10),
    "mlp 64-32-10": OneHidden(64, 32, 10),
    "mlp 784-50-10": OneHidden(784, 50, 10),
    "mlp 784-200-10": OneHidden(784, 200, 10),
}
SAMPLES: Final = (20, 60, 200, 600, 2000, 0)
"""Samples of each device; 0: unequal, from 10 to 300."""
BATCHES: Final = (0, 5, 20, 64)
"""Batch sizes; 0: full batches."""
EPOCHS: Final = (1, 5, 20)
DEVICES: Final = (10, 100)
MOST_WORK: Final = 4e9
"""Largest product of visited samples and coordinates, about half a second; larger cases are left out."""
QUICK_STEP: Final = 17
"""A quick run takes every so many cases."""
TURNS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Some work. Attributes as in the grids above; full batches take ``epochs`` steps."""

    network: str
    samples: int
    batch: int
    epochs: int
    devices: int

    @property
    def local(self) -> LocalSettings:
        """The recipe."""
        epochs, steps = (self.epochs, 0) if self.batch else (0, self.epochs)
        return LocalSettings(
            epochs=epochs,
            steps=steps,
            batch_size=self.batch,
            lr=0.01,
            lr_decay=1.0,
            momentum=0.0,
            clip=0.0,
            prox_mu=0.0,
        )

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of samples of each device, (devices,)."""
        if self.samples:
            return np.full(self.devices, self.samples, np.int64)
        return np.geomspace(10, 300, self.devices).astype(np.int64)

    @property
    def work(self) -> float:
        """Visited samples times coordinates."""
        return float(self.sizes.sum()) * self.epochs * NETWORKS[self.network].length

    def fleet(self) -> Fastest:
        """Return the trainers of such a fleet, with random data."""
        network, rng = NETWORKS[self.network], np.random.default_rng(0)
        shards = []
        for n in self.sizes.tolist():
            x = rng.random((n, network.inputs), np.float32)
            y = rng.random(n, np.float32) if isinstance(network, Linear) else rng.integers(0, network.classes, n)
            shards.append(Shard(x, y))
        return Fastest(network, Shelf(shards))


def cases() -> list[Case]:
    """Return all cases of the grid."""
    found = [
        Case(network=network, samples=samples, batch=batch, epochs=epochs, devices=devices)
        for network, samples, batch, epochs, devices in itertools.product(NETWORKS, SAMPLES, BATCHES, EPOCHS, DEVICES)
    ]
    return [case for case in found if case.work <= MOST_WORK]


def measure(case: Case, turns: int = TURNS) -> dict[str, float]:
    """Return each trainer's CPU seconds of one round of training."""
    fleet = case.fleet()
    shelf, network = fleet.shelf, fleet.network
    ids, models = np.arange(len(shelf)), torch.from_numpy(origins(network, 1, 0))

    def run(name: str) -> None:
        trainer, total = fleet.trainers[name], torch.zeros(network.length)
        for part in shelf.parts(ids, *trainer.limits(1)):
            orders = [np.random.default_rng(int(place)) for place in part]
            start = np.zeros(len(part), np.int64)
            trainer.train(models, start, shelf.block(part), orders, case.local, 1).add_to(
                total, np.arange(len(part)), None
            )

    names = [name for name in fleet.trainers if fits(name, network, case.sizes, case.local, on_cpu=True)]
    with torch.no_grad():
        return _race({name: (lambda name=name: run(name)) for name in names}, turns)  # type: ignore[misc]


def _race(runs: Mapping[str, Callable[[], None]], turns: int) -> dict[str, float]:
    least = dict.fromkeys(runs, float("inf"))
    for turn in range(turns + 1):
        for name, run in runs.items():
            begin = time.process_time()
            run()
            if turn:  # the first turn computes kernels, which are stored
                least[name] = min(least[name], time.process_time() - begin)
    return least


def counted(case: Case) -> dict[str, Work]:
    """Return the work of a case for each trainer, whose blocks differ."""
    labels = np.zeros(int(case.sizes.max()), np.int64)
    # Only the numbers of samples count, so the samples have no inputs here.
    fleet = Fastest(NETWORKS[case.network], Shelf([Shard(labels[:n, None], labels[:n]) for n in case.sizes.tolist()]))
    return {name: fleet.work(name, np.arange(case.devices), case.local, 1) for name in fleet.trainers}


def fit(times: Sequence[tuple[Case, Mapping[str, float]]]) -> dict[str, dict[str, float]]:
    """Return the nanoseconds of each term, by trainer: the non-negative ones with the least relative squared errors."""
    optimize = scipy_module("scipy.optimize")
    found = {}
    for name, terms in TERMS.items():
        rows = [(terms(counted(case)[name]), took[name]) for case, took in times if name in took]
        names = sorted({term for row, _ in rows for term in row})
        matrix = np.array([[row.get(term, 0.0) / took for term in names] for row, took in rows])
        values, _ = optimize.nnls(matrix, np.full(len(rows), 1e9))
        found[name] = {term: float(f"{value:.3g}") for term, value in zip(names, values, strict=True) if value}
    return found


def judge(
    times: Sequence[tuple[Case, Mapping[str, float]]], costs: Mapping[str, Mapping[str, float]] | None = None
) -> dict[str, float]:
    """Return how the trainer chosen by ``costs``, those of `costs.COSTS` if None, compares with the fastest one.

    Returns:
        share of cases in which it is the fastest, and mean, 95th percentile and largest of its time over the fastest's;
        and the mean for each trainer that is always taken where it can be.
    """
    chosen, always = [], {name: [] for name in TERMS}  # type: ignore[var-annotated]
    for case, took in times:
        works = counted(case)
        name = min(took, key=lambda name, works=works: seconds(name, works[name], costs))  # type: ignore[misc]
        best = min(took.values())
        chosen.append(took[name] / best)
        for each in TERMS:
            always[each].append(took.get(each, took["batched"]) / best)
    ratios = np.array(chosen)
    return {
        "cases": len(ratios),
        "fastest": float((ratios == 1.0).mean()),
        "mean": float(ratios.mean()),
        "percentile_95": float(np.percentile(ratios, 95)),
        "largest": float(ratios.max()),
        **{f"always {name}": float(np.mean(values)) for name, values in always.items()},
    }


def main() -> None:
    """Print the times as a table, how the choice compares, and new costs if asked."""
    chosen = cases()[:: QUICK_STEP if "--quick" in sys.argv else 1]
    times = []
    with limited_threads(1):
        for case in chosen:
            took = measure(case)
            times.append((case, took))
            shown = "  ".join(f"{name} {1e3 * s:8.2f}" for name, s in took.items())
            what = f"n {case.samples:4} b {case.batch:3} e {case.epochs:3} m {case.devices:4}"
            sys.stdout.write(f"{case.network:15} {what}  {shown} ms\n")
            sys.stdout.flush()
    if "--fit" in sys.argv:
        found = {"costs": fit(times), "unseen": judge(times[1::2], fit(times[::2]))}
        sys.stdout.write(json.dumps(found, indent=1) + "\n")
    sys.stdout.write(json.dumps(judge(times)) + "\n")


if __name__ == "__main__":
    main()
