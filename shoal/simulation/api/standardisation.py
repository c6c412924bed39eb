"""Standardisation of simulated devices' samples, by the functions that devices use.

With ``federated`` the run has rounds of statistics as a fleet's, of all devices and of clusters (`declaration`). Where no fleet
could have them, the statistics of all are averaged here in the clear, before the run. The bounds, which a task declares, are the
smallest and largest value of each feature on any device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from aggregator.numerics.averaging import capped_weights, weighted_mean
from edge_client.learning.standardisation import local_scale, scale_of
from edge_client.learning.statistics import scale_from, statistics_of
from edge_client.storage.scales import Scale
from shoal import limits
from shoal.errors import UsageError
from shoal.simulation.data import Population, Shard
from shoal.task.data_declaration import MAX_NAMES, STANDARDISE, DataDeclaration
from shoal.task.manifest import statistics_length

_NO_RUN: Final = bytes(16)


def scales_of(population: Population, standardise: str, weight_cap: float) -> tuple[Scale, ...]:
    """Return each device's scale; none for ``off``.

    Args:
        population: the devices' samples, float32.
        standardise: ``off``, ``local`` or ``federated``.
        weight_cap: largest weight of a device in the mean of statistics, in median weights; 0 is off.

    Raises:
        UsageError: ``standardise`` is something else, or the samples are whole numbers or too wide.
    """
    if standardise not in STANDARDISE:
        raise UsageError(f"standardise is {standardise!r}", hint=f"give one of {', '.join(STANDARDISE)}")
    if standardise == "off":
        return ()
    first = population.train[0].x
    if first.dtype.kind != "f":
        raise UsageError("samples of whole numbers can't be standardised", hint="leave standardise out")
    if standardise == "local":
        return tuple(local_scale(shard.x, _NO_RUN) for shard in population.train)
    width = int(np.prod(first.shape[1:], dtype=np.int64))
    if width > MAX_NAMES:
        raise UsageError(
            f"federated standardisation takes up to {MAX_NAMES} features, not {width}", hint="give standardise='local'"
        )
    data = _declared(population.train, width)
    vectors = [statistics_of(shard.x, data, statistics_length(width)) for shard in population.train]
    weights = capped_weights(population.samples.astype(np.float64), weight_cap)
    return (scale_from(weighted_mean(vectors, weights), data, _NO_RUN),) * len(population)


def declaration(population: Population, standardise: str, length: int) -> DataDeclaration | None:
    """Return the bounds of the samples if devices can send statistics of them; None if ``standardise`` asks for none.

    Args:
        population: the devices' samples in their own units, float32.
        standardise: as for `scales_of`.
        length: coordinates of an update.
    """
    width = int(np.prod(population.train[0].x.shape[1:], dtype=np.int64))
    if standardise != "federated" or statistics_length(width) > min(length, limits.MAX_STATISTICS):
        return None
    return _declared(population.train, width)


def _declared(shards: Sequence[Shard], width: int) -> DataDeclaration:
    """Return a declaration with the smallest and largest values as bounds, a little apart for a constant feature."""
    flat = [shard.x.reshape(len(shard), -1).astype(np.float64) for shard in shards]
    low = np.min([values.min(axis=0) for values in flat], axis=0)
    high = np.max([values.max(axis=0) for values in flat], axis=0)
    high = np.where(high > low, high, low + np.maximum(1.0, np.abs(low)))
    return DataDeclaration(
        features=tuple(f"feature {i}" for i in range(width)),
        low=tuple(low.tolist()),
        high=tuple(high.tolist()),
        standardise="federated",
    )


def target_scale(population: Population, target: Sequence[float] | None) -> tuple[float, float]:
    """Return the centre and the unit of the targets of a regression, as a task declares them.

    Without a range they are medians over devices, of the mean and of the deviation from it: no device alone moves them far.

    Args:
        population: the devices' samples.
        target: the range, LOW and HIGH, as `--target` of ``shoal-fleet task compile``; None if it is not given.

    Raises:
        UsageError: it is no two numbers.
        TaskError: they are no range.
    """
    if target is not None:
        try:
            return DataDeclaration(target=tuple(map(float, target))).target_scale
        except (TypeError, ValueError):
            raise UsageError(f"target is {target!r}", hint="give two numbers, LOW and HIGH") from None
    values = [shard.y.astype(np.float64) for shard in population.train]
    centre = np.median([y.mean() for y in values])
    found = scale_of(_NO_RUN, np.array([centre]), np.array([np.median([np.square(y - centre).mean() for y in values])]))
    return float(centre), found.deviations[0]


def scaled_targets(population: Population, scale: tuple[float, float]) -> Population:
    """Return a population with its targets less a scale's centre, in its unit, float32."""
    centre, unit = scale
    return population.mapped(lambda shard, _: Shard(shard.x, ((shard.y - centre) / unit).astype(np.float32)))
