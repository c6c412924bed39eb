"""`sweep`, which repeats a simulated run under several seeds and sums it up by mean and standard deviation."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np

from shoal.errors import UsageError
from shoal.simulation.api.models import Model
from shoal.simulation.api.partitions import Partition
from shoal.simulation.api.result import Result
from shoal.simulation.api.simulate import simulate

Partitions = Sequence[Partition] | Callable[[int], Sequence[Partition]]


@dataclass(frozen=True, repr=False)
class Sweep:
    """The results of one setting under several seeds.

    Attributes:
        seeds: as given.
        results: one for each seed.
    """

    seeds: tuple[int, ...]
    results: tuple[Result, ...]

    @property
    def values(self) -> list[float]:
        """The mean over devices of each run's accuracy, or for regression of its test loss; NaN without test shares."""
        return [_mean(r.loss if r.accuracy is None else r.accuracy) for r in self.results]

    @property
    def mean(self) -> float:
        """The mean of `values`."""
        return mean(self.values)

    @property
    def deviation(self) -> float:
        """The standard deviation of `values` with n - 1 degrees of freedom; NaN for a single seed."""
        return stdev(self.values) if len(self.values) > 1 else math.nan

    def __repr__(self) -> str:
        figure = "test loss" if self.results[0].accuracy is None else "accuracy"
        return f"{figure} {self.mean:.4f} ± {self.deviation:.4f} over {len(self.seeds)} seeds"

    def to_dataframe(self) -> Any:
        """Return the histories of all runs as a ``pandas.DataFrame`` with a column ``seed``, one row a round.

        Raises:
            ConfigError: pandas is not installed.
        """
        frames = [
            result.to_dataframe().assign(seed=seed) for seed, result in zip(self.seeds, self.results, strict=True)
        ]
        import pandas as pd

        return pd.concat(frames, ignore_index=True)


def sweep(model: Model, partitions: Partitions, *, seeds: Iterable[int] = range(5), **options: Any) -> Sweep:
    """Run `shoal.simulate` once for each seed.

    Args:
        model: as for `simulate`. A function or a name gives each seed starting weights of its own; a module always the same.
        partitions: as for `simulate`, or a function from the seed to them, so that the data are dealt anew as well.
        seeds: the seeds, all different.
        options: the other arguments of `simulate`, but ``seed``.

    Raises:
        UsageError: no seeds are given, or one twice, or ``seed`` is among the options.
        ShoalError: as `simulate`.
    """
    chosen = tuple(seeds)
    if not chosen or len(set(chosen)) != len(chosen):
        raise UsageError(f"seeds are different whole numbers, not {list(chosen)}")
    if "seed" in options:
        raise UsageError("a sweep takes seeds, not one seed", hint="seeds=range(5)")
    results = (
        simulate(model, partitions(seed) if callable(partitions) else partitions, seed=seed, **options)
        for seed in chosen
    )
    return Sweep(chosen, tuple(results))


def _mean(values: Any) -> float:
    return float(np.nanmean(values)) if np.isfinite(values).any() else math.nan
