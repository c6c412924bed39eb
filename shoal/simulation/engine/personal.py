"""The personal finish of simulated devices: each keeps its cluster's model, or a model of its own that is clearly better.

After the last round a device trains its cluster's model further and compares the results, and a model that it trained alone
from the start, by its own validation share. It leaves the cluster's model only for a gain of at least one standard error in
a paired test, since the best of several models on few samples is often best by chance.

A real device does not do this yet. The simulator measures it, so that results can be compared with it.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_client.learning.update import BatchOrder
from shoal.protocol.documents import LocalSettings
from shoal.protocol.messages import Share
from shoal.simulation.data import Shard
from shoal.simulation.engine.workforce import Workforce
from shoal.simulation.trainers.networks import tensor, unflatten

EPOCHS: Final = (1, 3, 10)
"""Local epochs on top of the cluster's model after which a device looks at the result."""
CLUSTER: Final = "cluster"
ALONE: Final = "alone"
FEWEST_PAIRS: Final = 2
"""Fewest validation samples of a paired test."""


@dataclass(frozen=True, slots=True)
class Personal:
    """The models that devices choose, measured on their test shares; arrays have shape (devices,).

    Attributes:
        losses: mean test loss, float64; NaN without a test share.
        correct: labels predicted right; tested: labels seen; int64.
        choices: ``cluster``, the number of local epochs on top, or ``alone``.
    """

    losses: NDArray[np.float64]
    correct: NDArray[np.int64]
    tested: NDArray[np.int64]
    choices: tuple[str, ...]


def measure(workforce: Workforce, models: NDArray[np.float32]) -> Personal:
    """Measure one model of each device, shape (devices, d), on its test share."""
    thetas = torch.from_numpy(models)
    count = len(thetas)
    losses, correct, tested = np.full(count, np.nan), np.zeros(count, np.int64), np.zeros(count, np.int64)
    for i, shard in enumerate(workforce.population.test):
        if len(shard):
            each, right = _sample_losses(workforce, thetas[i], shard)
            losses[i], correct[i], tested[i] = each.mean(), int(right.sum()), shard.y.size
    return Personal(losses, correct, tested, (CLUSTER,) * count)


def finish(
    workforce: Workforce, models: NDArray[np.float32], round_: int, alone: NDArray[np.float32] | None = None
) -> Personal:
    """Let every device choose its model.

    Args:
        workforce: the devices' data and the recipe of local training, of which an epoch is taken at a time.
        models: the model of each device's cluster, shape (devices, d).
        round_: number of the final round; the batch orders of the rounds from there on are used.
        alone: a model that each device trained alone, shape (devices, d); None if there are none.

    Raises:
        TaskError: training diverged.
    """
    candidates = {CLUSTER: torch.from_numpy(models)}
    if alone is not None:
        candidates[ALONE] = torch.from_numpy(alone)
    thetas = candidates[CLUSTER].clone()
    for epoch in range(1, max(EPOCHS) + 1):
        _train(workforce, thetas, round_ + epoch - 1)
        if epoch in EPOCHS:
            candidates[str(epoch)] = thetas.clone()
    choices = tuple(_choice(workforce, i, candidates) for i in range(len(models)))
    chosen = torch.stack([candidates[choice][i] for i, choice in enumerate(choices)])
    return dataclasses.replace(measure(workforce, chosen.numpy()), choices=choices)


def clearly_better(own: NDArray[np.float64], other: NDArray[np.float64]) -> bool:
    """Return whether ``other`` has the smaller losses (n,) by at least one standard error of the mean difference."""
    if len(own) < FEWEST_PAIRS:
        return False
    gains = own - other
    mean = float(gains.mean())
    return mean > 0 and mean >= float(gains.std(ddof=1)) / math.sqrt(len(gains))


def _choice(workforce: Workforce, device: int, candidates: dict[str, Tensor]) -> str:
    """Return the candidate with the least validation loss among the cluster's model and those clearly better than it."""
    shard = workforce.population.validation[device]
    if not len(shard):
        return CLUSTER
    losses = {name: _sample_losses(workforce, models[device], shard)[0] for name, models in candidates.items()}
    better = [name for name in candidates if name != CLUSTER and clearly_better(losses[CLUSTER], losses[name])]
    return min((CLUSTER, *better), key=lambda name: float(losses[name].mean()))


def _train(workforce: Workforce, thetas: Tensor, round_: int) -> None:
    """Train every device's model (devices, d) for an epoch, in place."""
    recipe = _epoch_of(workforce.run.local)
    shelf, names = workforce.shelf(Share.TRAIN), workforce.population.names
    with torch.no_grad():
        for part in shelf.parts(np.arange(len(thetas)), *workforce.trainer.limits(1)):
            orders = [BatchOrder(workforce.run, names[int(place)], round_) for place in part]
            models = thetas[torch.from_numpy(part)]
            trained = workforce.trainer.train(
                models, np.arange(len(part)), shelf.block(part), orders, recipe, workforce.run.rounds
            )
            thetas[torch.from_numpy(part)] = models + trained.rows().cpu()


def _epoch_of(local: LocalSettings) -> LocalSettings:
    """Return the recipe for one epoch; a recipe that counts steps is taken as it is."""
    return dataclasses.replace(local, epochs=1, steps=0) if local.epochs and local.batch_size else local


def _sample_losses(workforce: Workforce, theta: Tensor, shard: Shard) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return each sample's loss (n,) and number of right labels (n,)."""
    with torch.no_grad():
        outputs = workforce.network.forward(unflatten(workforce.network, theta), tensor(shard.x))
        losses, right = workforce.network.losses(outputs, tensor(shard.y))
    return losses.double().numpy(), right.numpy()
