"""The personal finish of simulated devices: each keeps its cluster's model, or a model of its own that is clearly better.

It is the finish of real devices (`edge_client.learning.finish`), by the same rule (`edge_client.learning.personal`), with
the same batches and the same fresh start of the model that is trained alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_client.learning.personal import (
    ALONE,
    CLUSTER,
    DITTO,
    EPOCHS,
    choose,
    ditto_recipe,
    is_trained,
    one_epoch,
    preferred,
)
from edge_client.learning.update import BatchOrder
from edge_client.models import fresh_start
from shoal.protocol.documents import LocalSettings
from shoal.protocol.messages import Share
from shoal.simulation.data import Shard
from shoal.simulation.engine.private import PrivateStart
from shoal.simulation.engine.workforce import Workforce
from shoal.simulation.trainers.blocks import Shelf, Trainer, without_diverged
from shoal.simulation.trainers.networks import Network, tensor, unflatten
from shoal.types import Float32Vector


@dataclass(frozen=True, slots=True)
class Personal:
    """The models that devices choose, measured on their test shares; arrays have shape (devices,).

    Attributes:
        losses: mean test loss, float64; NaN without a test share.
        correct: labels predicted right; tested: labels seen; int64.
        choices: names of the chosen candidates, as `edge_client.learning.personal` gives them.
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
            each, right = _sample_losses(workforce, thetas[i], shard)
            losses[i], correct[i], tested[i] = each.mean(), int(right.sum()), shard.y.size
    return Personal(losses, correct, tested, (CLUSTER,) * count)


@dataclass(frozen=True, slots=True)
class Alone:
    """The models that devices train alone.

    Attributes:
        thetas: one of each device, shape (devices, d), float32; NaN where training diverged.
        again: trains the devices at ``places`` (c,) once more, on their training and validation samples: (c, d), float32.
    """

    thetas: NDArray[np.float32]
    again: Callable[[NDArray[np.int64]], NDArray[np.float32]]


def finish(
    workforce: Workforce,
    models: NDArray[np.float32],
    round_: int,
    alone: Alone | None = None,
    *,
    above: Sequence[Mapping[str, Float32Vector]] = (),
    weight: float = 0.0,
) -> Personal:
    """Let every device choose its model, and train a chosen one again with the validation samples.

    Args:
        workforce: the devices' data and the recipe of local training, of which an epoch is taken at a time.
        models: the model of each device's cluster, shape (devices, d), here and below with private coordinates if there are any.
        round_: number of the final round; the batch orders of the rounds from there on are used.
        alone: the models that devices trained alone; None if there are none.
        above: of each device the models above its own in cfl's tree, by candidate; empty if there are none.
        weight: of Ditto's proximal term; 0 leaves that candidate out.
    """
    chosen, choices = chosen_models(workforce, models, round_, alone, above=above, weight=weight)
    return dataclasses.replace(measure(workforce, chosen), choices=choices)


def chosen_models(
    workforce: Workforce,
    models: NDArray[np.float32],
    round_: int,
    alone: Alone | None = None,
    *,
    above: Sequence[Mapping[str, Float32Vector]] = (),
    weight: float = 0.0,
) -> tuple[NDArray[np.float32], tuple[str, ...]]:
    """Return the model (devices, d) that each device keeps, and the name of its candidate; see `finish`.

    A candidate whose training diverges is left out, as on a device.

    The model of the first training stays if the same test prefers it to that of the second.
    """
    found = candidates(workforce, models, round_, alone, above=above, weight=weight)
    losses = [sample_losses(workforce, i, each) for i, each in enumerate(found)]
    labels = workforce.network.kind != "regression"
    choices = tuple(choose(each, labels=labels) if each else CLUSTER for each in losses)
    chosen = torch.stack([each[choice] for each, choice in zip(found, choices, strict=True)]).numpy()
    for name in sorted(set(choices)):
        if is_trained(name):
            places = np.flatnonzero(np.array(choices) == name)
            again = _trained_again(workforce, models[places], places, name, round_, alone, weight)
            for place, theta in zip(places.tolist(), again, strict=True):
                second = sample_losses(workforce, place, {name: torch.from_numpy(theta)})[name]
                if not preferred(second, losses[place][name], labels=labels):
                    chosen[place] = theta
    return chosen, choices


def _trained_again(
    workforce: Workforce,
    models: NDArray[np.float32],
    places: NDArray[np.int64],
    choice: str,
    round_: int,
    alone: Alone | None,
    weight: float,
) -> NDArray[np.float32]:
    """Train the candidate ``choice`` of the devices at ``places`` (c,) on their training and validation samples: (c, d).

    ``models`` (c, d) are those of their clusters; the other arguments are as for `finish`.
    """
    if choice == ALONE:
        assert alone is not None
        return alone.again(places)
    shelf = Shelf(workforce.population.of(places).with_validation().train, workforce.device)
    work = _Training(workforce, shelf, workforce.trainer_on(shelf), [workforce.population.names[i] for i in places])
    local, thetas = workforce.run.local, torch.from_numpy(models).clone()
    if choice == DITTO:
        work.train(thetas, round_, ditto_recipe(local, weight))
    else:
        for epoch in range(int(choice)):
            work.train(thetas, round_ + epoch, one_epoch(local))
    return thetas.numpy()


def candidates(
    workforce: Workforce,
    models: NDArray[np.float32],
    round_: int,
    alone: Alone | None = None,
    *,
    above: Sequence[Mapping[str, Float32Vector]] = (),
    weight: float = 0.0,
) -> list[dict[str, Tensor]]:
    """Return the candidates (d,) of every device by name, in the order of `edge_client.learning.finish`; see `finish`."""
    local = workforce.run.local
    start, shelf = torch.from_numpy(models), workforce.shelf(Share.TRAIN)
    work = _Training(workforce, shelf, workforce.trainer, workforce.population.names)
    stacked = {CLUSTER: start}
    thetas = start.clone()
    for epoch in range(1, max(EPOCHS) + 1):
        work.train(thetas, round_ + epoch - 1, one_epoch(local))
        if epoch in EPOCHS:
            stacked[str(epoch)] = thetas.clone()
    later: dict[str, Tensor] = {}
    if weight:
        later[DITTO] = start.clone()
        work.train(later[DITTO], round_, ditto_recipe(local, weight))
    if alone is not None:
        later[ALONE] = torch.from_numpy(alone.thetas)
    found = []
    for i in range(len(models)):
        nodes = above[i] if above else {}
        mine = {name: all_[i] for name, all_ in stacked.items()}
        mine |= {name: torch.from_numpy(theta) for name, theta in nodes.items()}
        found.append(mine | {name: all_[i] for name, all_ in later.items()})
    return found


def sample_losses(workforce: Workforce, device: int, models: Mapping[str, Tensor]) -> dict[str, NDArray[np.float64]]:
    """Return each candidate's loss of each validation sample of a device, (n,) by name; empty without such samples."""
    shard = workforce.population.validation[device]
    if not len(shard):
        return {}
    return {name: _sample_losses(workforce, theta, shard)[0] for name, theta in models.items()}


def drawn_start(
    network: Network, origin: Float32Vector, seed: int, private: PrivateStart | None = None
) -> NDArray[np.float32]:
    """Return the whole model (1, d + p) from which devices train alone after a run that began with ``origin`` (d,), float32."""
    lengths = [int(np.prod(shape)) for shape in network.shapes]
    if private is None:
        return fresh_start.draw(fresh_start.figures_of(origin, lengths), lengths, seed)[None]
    # In the order of a compiled task, whose private tensors come last.
    federated = private.federated(network.length)
    firsts = np.cumsum([0, *lengths[:-1]])
    own = np.isin(firsts, private.places)
    ordered = [n for n, mine in zip(lengths, own, strict=True) if not mine]
    ordered += [n for n, mine in zip(lengths, own, strict=True) if mine]
    whole = np.concatenate((origin, private.values))
    found = np.empty((1, network.length), np.float32)
    found[0, np.concatenate((federated, private.places))] = fresh_start.draw(
        fresh_start.figures_of(whole, ordered), ordered, seed
    )
    return found


@dataclass(frozen=True, slots=True)
class _Training:
    """Some devices, the samples on which they train, and the trainer for these samples; names (c,) in the order of the shelf."""

    workforce: Workforce
    shelf: Shelf
    trainer: Trainer
    names: Sequence[str]

    def train(self, thetas: Tensor, round_: int, recipe: LocalSettings) -> None:
        """Train the devices' models (c, d) by a recipe, in place; a model whose training diverges is NaN from then on."""
        run, places = self.workforce.run, np.flatnonzero(torch.isfinite(thetas).all(1))

        def train(part: NDArray[np.int64]) -> None:
            orders = [BatchOrder(run, self.names[int(place)], round_) for place in part]
            models = thetas[torch.from_numpy(part)]
            block = self.shelf.block(part)
            trained = self.trainer.train(models, np.arange(len(part)), block, orders, recipe, run.rounds)
            thetas[torch.from_numpy(part)] = models + trained.rows().cpu()

        with torch.no_grad():
            _, lost = without_diverged(self.shelf.parts(places, self.trainer.limits(1, recipe)), train)
        thetas[lost] = torch.nan


def _sample_losses(workforce: Workforce, theta: Tensor, shard: Shard) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Return each sample's loss (n,) and number of right labels (n,)."""
    with torch.no_grad():
        outputs = workforce.network.forward(unflatten(workforce.network, theta), tensor(shard.x))
        losses, right = workforce.network.losses(outputs, tensor(shard.y))
    return losses.double().numpy(), right.numpy()
