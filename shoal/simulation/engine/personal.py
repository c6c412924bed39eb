"""The personal finish of simulated devices: each keeps its cluster's model, or a model of its own that is clearly better.

It is the finish of real devices (`edge_client.learning.finish`), which trains and scores these networks here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_client.learning.data import Dataset, DataSplits
from edge_client.learning.finish import Chosen, Ended
from edge_client.learning.finish import finish as finish_of_device
from edge_client.learning.finish_rule import CLUSTER
from edge_client.learning.model import Score
from edge_client.models import fresh_start
from shoal.simulation.data import Shard
from shoal.simulation.engine.private import PrivateStart
from shoal.simulation.engine.workforce import Workforce
from shoal.simulation.trainers.networks import Network, tensor, unflatten
from shoal.types import Float32Vector


@dataclass(frozen=True, slots=True)
class Personal:
    """The models that devices choose, measured on their test shares; arrays have shape (devices,).

    Attributes:
        losses: mean test loss, float64; NaN without a test share.
        correct: labels predicted right; tested: labels seen; int64.
        choices: names of the chosen candidates, as `edge_client.learning.finish_rule` gives them.
    """

    losses: NDArray[np.float64]
    correct: NDArray[np.int64]
    tested: NDArray[np.int64]
    choices: tuple[str, ...]


def measure(workforce: Workforce, models: NDArray[np.float32], tests: Sequence[Shard] = ()) -> Personal:
    """Measure one model of each device, shape (devices, d), on its test share, or on its own one of ``tests``."""
    thetas = torch.from_numpy(models)
    count = len(thetas)
    losses, correct, tested = np.full(count, np.nan), np.zeros(count, np.int64), np.zeros(count, np.int64)
    for i, shard in enumerate(tests or workforce.population.test):
        if len(shard):
            each, right = _sample_losses(workforce.network, thetas[i], shard)
            losses[i], correct[i], tested[i] = each.mean(), int(right.sum()), shard.y.size
    return Personal(losses, correct, tested, (CLUSTER,) * count)


def finish(
    workforce: Workforce,
    models: NDArray[np.float32],
    round_: int,
    fresh: Float32Vector | None = None,
    *,
    above: Sequence[Mapping[str, Float32Vector]] = (),
    weight: float = 0.0,
) -> Personal:
    """Let every device choose its model, and train a chosen one again with the validation samples.

    Args:
        workforce: the devices' data and the recipe of local training, of which an epoch is taken at a time.
        models: the model of each device's cluster, shape (devices, d), here and below with private coordinates if there are any.
        round_: number of the final round; the batch orders of the rounds from there on are used.
        fresh: the model (d,) from which devices train alone; None if they don't.
        above: of each device the models above its own in cfl's tree, by candidate; empty if there are none.
        weight: of Ditto's proximal term; 0 leaves that candidate out.
    """
    found = chosen(workforce, models, round_, fresh, above=above, weight=weight)
    measured = measure(workforce, np.stack([each.theta for each in found]))
    return dataclasses.replace(measured, choices=tuple(each.choice for each in found))


def chosen(
    workforce: Workforce,
    models: NDArray[np.float32],
    round_: int,
    fresh: Float32Vector | None = None,
    *,
    above: Sequence[Mapping[str, Float32Vector]] = (),
    weight: float = 0.0,
) -> list[Chosen]:
    """Return what each device keeps; one without validation samples keeps its cluster's model. See `finish`."""
    population, backend, found = workforce.population, _Backend(workforce.network), []
    for i, theta in enumerate(models):
        train, validation = population.train[i], population.validation[i]
        if not len(validation):
            found.append(Chosen(CLUSTER, theta, {}, 0, 0))
            continue
        held = Dataset(validation.x, validation.y)
        shares = DataSplits(Dataset(train.x, train.y), held, held)
        ended = Ended(
            plan=workforce.run,
            device=population.names[i],
            round=round_,
            own=theta,
            above=above[i] if above else {},
            fresh=None if fresh is None else lambda: fresh,
            weight=weight,
        )
        found.append(finish_of_device(ended, shares, backend, lambda: False))
    return found


def drawn_start(
    network: Network, origin: Float32Vector, seed: int, private: PrivateStart | None = None
) -> Float32Vector:
    """Return the whole model (d + p,) from which devices train alone after a run that began with ``origin`` (d,), float32."""
    lengths = [int(np.prod(shape)) for shape in network.shapes]
    if private is None:
        return fresh_start.draw(fresh_start.figures_of(origin, lengths), lengths, seed)
    # In the order of a compiled task, whose private tensors come last.
    federated = private.federated(network.length)
    firsts = np.cumsum([0, *lengths[:-1]])
    own = np.isin(firsts, private.places)
    ordered = [n for n, mine in zip(lengths, own, strict=True) if not mine]
    ordered += [n for n, mine in zip(lengths, own, strict=True) if mine]
    whole = np.concatenate((origin, private.values))
    found = np.empty(network.length, np.float32)
    found[np.concatenate((federated, private.places))] = fresh_start.draw(
        fresh_start.figures_of(whole, ordered), ordered, seed
    )
    return found


@dataclass(frozen=True, slots=True)
class _Backend:
    """Trains and scores a network as a device's executor does a task: see `edge_client.learning.model.Backend`."""

    network: Network

    def score(self, theta: Float32Vector, x: NDArray[Any], y: NDArray[Any]) -> Score:
        losses, right = _sample_losses(self.network, torch.from_numpy(theta), Shard(x, y))
        return Score(float(losses.mean()), int(right.sum()), y.size)

    def grad(self, theta: Float32Vector, x: NDArray[Any], y: NDArray[Any]) -> tuple[float, Float32Vector]:
        leaf = torch.from_numpy(theta).requires_grad_()
        with torch.enable_grad():
            outputs = self.network.forward(unflatten(self.network, leaf), tensor(x))
            loss = self.network.losses(outputs, tensor(y))[0].mean()
        (gradient,) = torch.autograd.grad(loss, leaf)
        return float(loss.detach()), gradient.numpy()

    def predict(self, theta: Float32Vector, x: NDArray[Any]) -> NDArray[np.float32]:
        with torch.no_grad():
            outputs: NDArray[np.float32] = self.network.forward(
                unflatten(self.network, torch.from_numpy(theta)), tensor(x)
            ).numpy()
        return outputs


def _sample_losses(network: Network, theta: Tensor, shard: Shard) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return each sample's loss (n,) and number of right labels (n,)."""
    with torch.no_grad():
        losses, right = network.losses(network.forward(unflatten(network, theta), tensor(shard.x)), tensor(shard.y))
    return losses.double().numpy(), right.numpy()
