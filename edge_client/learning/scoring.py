"""Losses on a device's data, and IFCA's cluster estimate: the model with the least (Ghosh et al., Algorithm 1, line 8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from edge_client.learning.model import Backend, OwnTraining
from edge_client.learning.training import Cancelled
from shoal.errors import TaskError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_client.learning.data import Dataset
    from shoal.types import Float32Vector


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
