"""Losses on a device's data, and IFCA's cluster estimate: the model with the least (Ghosh et al., Algorithm 1, line 8).

Also the nearest of several models to one that the device has trained, by distance or by direction. Strategies assign devices by
it, since only devices hold models that were masked under different keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from edge_client.learning.model import Backend, OwnTraining
from edge_client.learning.training import Cancelled
from shoal.errors import TaskError
from shoal.types import Float32Vector

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_client.learning.data import Dataset


def _never() -> bool:
    return False


def score(models: Sequence[Float32Vector], batch: Dataset, backend: Backend) -> NDArray[np.float64]:
    """Return each model's mean loss on the batch, shape (k,), float64.

    Args:
        models: k vectors of shape (d,), float32.
        batch: n samples.
        backend: evaluates the task's loss.
    """
    if isinstance(backend, OwnTraining):
        means = [backend.losses(theta, batch.x, batch.y, _never).mean() for theta in models]
    else:
        means = [backend.score(theta, batch.x, batch.y).mean_loss for theta in models]
    return np.array(means, dtype=np.float64)


def choose(losses: NDArray[np.float64]) -> int:
    """Return the index of the smallest loss: the lowest index on ties, never one whose loss is NaN.

    Args:
        losses: shape (k,), float64.

    Raises:
        TaskError: there is no loss, or all of them are NaN.
    """
    usable = np.flatnonzero(~np.isnan(losses))
    if not len(usable):
        raise TaskError(
            "no model has a usable loss on this device's data", hint="check the data, lower the learning rate"
        )
    # Not nanargmin: it takes NaN for infinity, and would return a NaN's index if all other losses are infinite.
    return int(usable[np.argmin(losses[usable])])


def sample_losses(
    theta: Float32Vector, batch: Dataset, backend: Backend, cancelled: Callable[[], bool] = _never
) -> NDArray[np.float64]:
    """Return the model's loss of each sample, shape (n,), float64; NaN where it is not finite.

    Raises:
        Cancelled: ``cancelled()`` returned true.
    """
    if isinstance(backend, OwnTraining):
        found = backend.losses(theta, batch.x, batch.y, cancelled)
        return np.where(np.isfinite(found), found, np.nan)
    losses = np.empty(len(batch), np.float64)
    for i in range(len(batch)):
        if cancelled():
            raise Cancelled("scoring was cancelled")
        loss = backend.score(theta, batch.x[i : i + 1], batch.y[i : i + 1]).mean_loss
        losses[i] = loss if math.isfinite(loss) else np.nan
    return losses


BLOCK: Final = 1 << 16
"""Coordinates that are compared at a time, so that no float64 copy of a whole model is made."""


def nearest_model(own: int, delta: Float32Vector, compare: Collection[int], models: Mapping[int, Float32Vector]) -> int:
    """Return the model with the least l2 distance from ``models[own] + delta``, measured in float64.

    Args:
        own: the model that the device trained from; at a tie it is chosen, if it is compared, else the smallest id.
        delta: shape (d,), float32, the update.
        compare: ids of the models to compare with, at least one.
        models: theta (d,), float32, of ``own`` and all of ``compare``.
    """
    apart = {model: _squared_distance(models[own], delta, models[model]) for model in compare}
    return min(apart, key=lambda model: (apart[model], model != own, model))


def nearest_direction(
    start: int, delta: Float32Vector, compare: Collection[int], models: Mapping[int, Float32Vector]
) -> int:
    """Return the model whose difference from ``models[start]`` has the largest cosine with ``delta``, measured in float64.

    Args:
        start: the model that the device trained from.
        delta: shape (d,), float32, the update.
        compare: ids of the models to compare with, at least one. One that equals ``models[start]`` has cosine 0. At a tie the
            smallest id is chosen.
        models: theta (d,), float32, of ``start`` and all of ``compare``.
    """
    cosines = {model: _scaled_cosine(delta, models[start], models[model]) for model in compare}
    return min(cosines, key=lambda model: (-cosines[model], model))


def _scaled_cosine(delta: Float32Vector, start: Float32Vector, other: Float32Vector) -> float:
    """Return the cosine of ``delta`` and ``other - start``, times the length of ``delta``."""
    product = squared = 0.0
    for at in range(0, len(delta), BLOCK):
        block = slice(at, at + BLOCK)
        apart = np.subtract(other[block], start[block], dtype=np.float64)
        product += float(np.dot(apart, delta[block].astype(np.float64)))
        squared += float(np.dot(apart, apart))
    return product / squared**0.5 if squared else 0.0


def _squared_distance(start: Float32Vector, delta: Float32Vector, other: Float32Vector) -> float:
    """Return |start + delta - other|^2."""
    total = 0.0
    for at in range(0, len(delta), BLOCK):
        block = slice(at, at + BLOCK)
        apart = np.subtract(start[block], other[block], dtype=np.float64) + delta[block]
        total += float(np.dot(apart, apart))
    return total
