"""All devices of a block at once: batched matrix products for stacks of linear layers, mini-batch or full batch.

A device with fewer steps drops out before the others; a shorter batch is filled up with samples of weight 0.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_client.learning.training import Shuffler
from shoal.protocol.documents import LocalSettings
from shoal.simulation.trainers import dense
from shoal.simulation.trainers.blocks import Block, Rows, Schedule, check_losses, devices_within, schedule, step_size
from shoal.simulation.trainers.dense import Dense, Descent
from shoal.simulation.trainers.networks import unflatten

PARAMETER_FLOATS: Final = 1_000_000
"""Parameters that the devices of a block may have together, 4 MB: a step reads and writes all of them, so they should stay in the
cache. Blocks of four times as many took up to a third longer."""


@dataclass(frozen=True, slots=True)
class Batched:
    """Trains linear regression, softmax regression and one hidden layer."""

    network: Dense

    def limits(self, _candidates: int) -> tuple[int, int]:
        """Return the most devices and samples of a block."""
        return devices_within(PARAMETER_FLOATS, self.network.length, 256), 1 << 20

    def train(
        self,
        models: Tensor,
        start: NDArray[np.int64],
        block: Block,
        orders: Sequence[Shuffler],
        local: LocalSettings,
        round_: int,
    ) -> Rows:
        """Train every device of the block: see `blocks.Trainer`."""
        mini = schedule(block.lengths, local, orders, models.device) if local.batch_size else None
        sort = np.arange(len(start)) if mini is None else mini.by_steps
        params = dense.copies(unflatten(self.network, models), torch.from_numpy(start[sort]).to(models.device))
        descent = Descent(params, step_size(local, round_), local, dense.has_bias(self.network))
        losses = np.empty(len(start))
        losses[sort] = self._full(descent, block, local.steps) if mini is None else self._mini(descent, block, mini)
        updates = torch.empty(len(start), models.shape[1], device=models.device)
        updates[torch.from_numpy(sort).to(models.device)] = torch.cat(descent.changes(), 1)
        return Rows(updates, check_losses(losses))

    def _step(self, descent: Descent, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        """Take one step of the first len(x) devices; return their summed losses (a,)."""
        a = len(x)
        params = [p[:a] for p in descent.params]
        bias = dense.has_bias(self.network)
        pre = dense.first_layer(params, x, bias=bias)
        factors, below, losses = dense.errors(self.network, params[2:] if bias else params[1:], pre, y, w)
        descent.step([(below, x), *factors], a)
        return losses.sum(1)

    def _full(self, descent: Descent, block: Block, steps: int) -> NDArray[np.float64]:
        w = block.weights()
        total = torch.zeros(len(w), device=w.device)
        for _ in range(steps):
            total += self._step(descent, block.x, block.y, w)
        return total.double().cpu().numpy() / (block.lengths * steps)

    def _mini(self, descent: Descent, block: Block, mini: Schedule) -> NDArray[np.float64]:
        x, y = block.x.flatten(0, 1), block.y.flatten(0, 1)
        base = torch.from_numpy(mini.by_steps * block.x.shape[1]).to(x.device).unsqueeze(1)
        total = torch.zeros(len(base), device=x.device)
        chosen = x.new_empty(mini.rows[0].numel(), x.shape[1])
        for rows, w, a in zip(mini.rows, mini.weights, mini.active.tolist(), strict=True):
            at = (rows[:a] + base[:a]).flatten()
            xs = torch.index_select(x, 0, at, out=chosen[: len(at)]).view(a, -1, x.shape[1])
            total[:a] += self._step(descent, xs, y.index_select(0, at).view(a, -1), w[:a])
        return total.double().cpu().numpy() / mini.visited
