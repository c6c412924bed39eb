"""The reference trainer: one device after another, by autograd. It trains any network; tests compare the others to it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_client.learning.data import Dataset
from edge_client.learning.training import Shuffler, batches
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.trainers.blocks import (
    UPDATE_FLOATS,
    Block,
    Limits,
    Rows,
    check_losses,
    devices_within,
    step_size,
)
from shoal.simulation.trainers.networks import Network


@dataclass(frozen=True, slots=True)
class Loop:
    """Trains any network, device by device."""

    network: Network

    def limits(self, _candidates: int, _local: LocalTraining) -> Limits:
        """Return the limits of a block: it holds every device's update."""
        return Limits(devices_within(UPDATE_FLOATS, self.network.length, 64))

    def train(
        self,
        models: Tensor,
        start: NDArray[np.int64],
        block: Block,
        orders: Sequence[Shuffler],
        local: LocalTraining,
        round_: int,
    ) -> Rows:
        """Train every device of the block: see `blocks.Trainer`."""
        updates = models[torch.from_numpy(start).to(models.device)]
        losses = np.empty(len(block.lengths))
        for i, n in enumerate(block.lengths):
            losses[i] = train_one(self.network, updates[i], block.x[i, :n], block.y[i, :n], orders[i], local, round_)
        return Rows(updates, check_losses(losses))


def train_one(
    network: Network, theta: Tensor, x: Tensor, y: Tensor, order: Shuffler, local: LocalTraining, round_: int
) -> float:
    """Turn one device's model into its update; return its mean loss over the samples visited, NaN if the update is not finite.

    Args:
        network: the network to train.
        theta: shape (d,), float32, contiguous: the model, and then how far it has moved.
        x: shape (n, ...).
        y: shape (n, ...).
        order: gives batch orders.
        local: the recipe.
        round_: counted from 1.
    """
    lr, first, total, seen = step_size(local, round_), theta.clone(), 0.0, 0
    plain = not (local.prox_mu or local.clip or local.momentum)
    velocity = torch.zeros_like(theta) if local.momentum else None
    places = np.arange(len(x))
    with network.bound(theta) as (params, gradients):
        for rows, _ in batches(Dataset(places, places), local, order):
            at = torch.from_numpy(rows).to(x.device) if local.batch_size else slice(None)
            loss, gradient = gradients(x[at], y[at])
            with torch.no_grad():
                if plain:
                    torch._foreach_add_(params, gradient, alpha=-lr)
                else:
                    step = torch.cat([g.flatten() for g in gradient])
                    if local.prox_mu:
                        step.add_(theta - first, alpha=local.prox_mu)
                    if local.clip:
                        step.mul_(min(1.0, local.clip / float(step.norm())) if step.any() else 1.0)
                    if velocity is not None:
                        step = velocity.mul_(local.momentum).add_(step)
                    theta.sub_(step, alpha=lr)
            total += float(loss) * len(rows)
            seen += len(rows)
    theta.sub_(first)
    return total / seen if bool(torch.isfinite(theta).all()) else math.nan
