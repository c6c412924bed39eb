"""The networks of CFL's image experiments."""

from __future__ import annotations

import math

from shoal.errors import UsageError
from shoal.simulation.trainers.networks import Cnn, Network, OneHidden
from shoal_lab.experiments.data.datasets import CLASSES, Dataset


def network_for(model: str, data: Dataset, hidden: int) -> Network:
    """Return the network called ``model`` for ``data``: ``cnn`` (6 and 16 filters of 5x5, 120 and 84 units) or ``mlp``.

    Raises:
        UsageError: there is no such network.
    """
    shape = data.x_train.shape[1:]
    if model == "cnn":
        channels = shape[0] if len(shape) == 3 else 1
        return Cnn(channels=channels, side=shape[-1], classes=CLASSES)
    if model == "mlp":
        return OneHidden(math.prod(shape), hidden, CLASSES)
    raise UsageError(f"no network {model!r}", hint="there are cnn and mlp")
