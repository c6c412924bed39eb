"""The reference trainer: one device after another, autograd step by step. Slow and simple; tests compare the others to it."""

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
from shoal.simulation.trainers.networks import Network, unflatten


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
        updates = torch.empty(len(block.lengths), models.shape[1], device=models.device)
        losses = np.empty(len(block.lengths))
        for i, n in enumerate(block.lengths):
            x, y = block.x[i, :n], block.y[i, :n]
            with torch.enable_grad():
                updates[i], losses[i] = train_one(self.network, models[start[i]], x, y, orders[i], local, round_)
        return Rows(updates, check_losses(losses))


def train_one(
    network: Network, theta0: Tensor, x: Tensor, y: Tensor, order: Shuffler, local: LocalTraining, round_: int
) -> tuple[Tensor, float]:
    """Return one device's update (d,) and its mean loss over the samples visited, which is NaN if the update is not finite.

    Args:
        network: the network to train.
        theta0: shape (d,), float32.
        x: shape (n, ...).
        y: shape (n, ...).
        order: gives batch orders.
        local: the recipe.
        round_: counted from 1.
    """
    lr = step_size(local, round_)
    first = [p.clone() for p in unflatten(network, theta0)]
    params = [p.clone().requires_grad_() for p in first]
    velocity = [torch.zeros_like(p) for p in first] if local.momentum else []
    total, seen = 0.0, 0
    for some in batches(Dataset(x.cpu().numpy(), y.cpu().numpy()), local, order):
        xs, ys = (torch.from_numpy(part).to(x.device) for part in some)
        loss = network.losses(network.forward(params, xs), ys)[0].mean()
        step = list(torch.autograd.grad(loss, params))
        with torch.no_grad():
            if local.prox_mu:
                step = [g + local.prox_mu * (p - f) for g, p, f in zip(step, params, first, strict=True)]
            if local.clip:
                norm = float(torch.sqrt(sum((g * g).sum() for g in step)))  # type: ignore[arg-type]
                if norm > local.clip:
                    step = [g * (local.clip / norm) for g in step]
            if velocity:
                velocity = [local.momentum * v + g for v, g in zip(velocity, step, strict=True)]
                step = velocity
            for p, g in zip(params, step, strict=True):
                p.sub_(g, alpha=lr)
        total += float(loss.detach()) * len(xs)
        seen += len(xs)
    update = torch.cat([(p.detach() - f).reshape(-1) for p, f in zip(params, first, strict=True)]).detach()
    return update, total / seen if bool(torch.isfinite(update).all()) else math.nan
