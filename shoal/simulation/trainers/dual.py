"""The dual form: gradient descent of the first layer on a device's own samples, without the layer's weights.

Every gradient of W1 and b1 is A^T [X 1], with A (n, out) the first layer's errors of the samples used, so that after
any number of steps, also with momentum and a proximal term (they are linear), W1 = W1_0 + U^T X and b1 = b1_0 + U^T 1
for some U (n, out). The first layer's outputs are then X W1^T + b1 = H0 + K U, with H0 the outputs of the model that the
device started from and K = X X^T + 1. K (n, n) is computed once for all rounds and a step costs n/inputs of the usual
one. The weighted sum of many devices' updates is one matrix product, without computing single updates. `costs` estimates
when all of this pays; a device should have fewer samples than a sample has inputs, or K takes more memory than its data.
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
from shoal.errors import UsageError
from shoal.protocol.documents import LocalSettings
from shoal.simulation.trainers import dense
from shoal.simulation.trainers.blocks import Block, Schedule, Shelf, Trained, check_losses, schedule, step_size
from shoal.simulation.trainers.dense import Dense, Descent
from shoal.simulation.trainers.networks import sample_losses, unflatten
from shoal.simulation.trainers.scoring import behind, preactivations

KERNEL_BYTES: Final = 1 << 30
"""Memory for kernels that are cached between rounds; those of further devices are computed again every round."""
BLOCK_FLOATS: Final = 1_300_000
"""First-layer outputs of all candidates that a block holds: 5 MB, for they are read again right after."""
MOST_DEVICES: Final = 128


class Kernels:
    """X X^T + bias of every device, (n, n) each, computed on first use.

    Args:
        shelf: the training data; bias: whether the first layer has one.
    """

    def __init__(self, shelf: Shelf, *, bias: bool) -> None:
        self._sizes, self._bias = shelf.sizes, bias
        self._equal = bool((shelf.sizes == shelf.sizes[0]).all())
        self._left = KERNEL_BYTES
        self._stack: Tensor | None = None
        self._known = np.zeros(len(shelf), bool)
        self._own: dict[int, Tensor] = {}
        n = int(shelf.sizes[0])
        if self._equal and 4 * n * n * len(shelf) <= KERNEL_BYTES:
            self._stack = torch.empty(len(shelf), n, n, device=shelf.device)

    def of(self, block: Block) -> Tensor:
        """Return the kernels of a block's devices, shape (c, n, n), float32; padded samples have arbitrary rows."""
        if self._stack is not None:
            return self._from_stack(self._stack, block)
        missing = [i for i, place in enumerate(block.ids) if int(place) not in self._own]
        if len(missing) == len(block.ids):
            kernel = self._compute(block.x)
            for i in missing:
                self._keep(int(block.ids[i]), kernel[i])
            return kernel
        n = block.x.shape[1]
        kernel = block.x.new_zeros(len(block.ids), n, n)
        if missing:
            fresh = self._compute(block.x[torch.from_numpy(np.array(missing)).to(block.x.device)])
            for row, i in enumerate(missing):
                kernel[i] = fresh[row]
                self._keep(int(block.ids[i]), fresh[row])
        for i, place in enumerate(block.ids):
            if i not in missing:
                own = self._own[int(place)]
                kernel[i, : len(own), : len(own)] = own
        return kernel

    def _from_stack(self, stack: Tensor, block: Block) -> Tensor:
        ids = block.ids
        follows = bool((np.diff(ids) == 1).all())
        if follows:
            kernels = stack[int(ids[0]) : int(ids[-1]) + 1]
            if not self._known[ids].all():
                self._compute(block.x, out=kernels)
                self._known[ids] = True
            return kernels
        index = torch.from_numpy(ids).to(stack.device)
        if not self._known[ids].all():
            stack[index] = self._compute(block.x)
            self._known[ids] = True
        return stack[index]

    def _compute(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        kernel = torch.bmm(x, x.transpose(1, 2)) if out is None else torch.bmm(x, x.transpose(1, 2), out=out)
        return kernel.add_(1.0) if self._bias else kernel

    def _keep(self, place: int, kernel: Tensor) -> None:
        n = int(self._sizes[place])
        if 4 * n * n <= self._left:
            self._left -= 4 * n * n
            self._own[place] = kernel[:n, :n].clone()


@dataclass(frozen=True, slots=True)
class Scored:
    """Losses of k models on a block, and their first layers' outputs, which training can reuse.

    Attributes:
        losses: shape (c, k), float64.
        pre: first-layer outputs, shape (c, n, k, out).
    """

    losses: NDArray[np.float64]
    pre: Tensor

    def of(self, chosen: NDArray[np.int64]) -> Tensor:
        """Return the outputs under each device's chosen model, shape (c, n, out), in new memory."""
        index = torch.from_numpy(chosen).to(self.pre.device)
        return self.pre[torch.arange(len(chosen), device=self.pre.device), :, index]


@dataclass(frozen=True, slots=True, kw_only=True)
class DualTrained:
    """Updates in the dual form.

    Attributes:
        coefficients: U, shape (c, n, out); x: shape (c, n, inputs); kernel: shape (c, n, n).
        tail: changes of the parameters after the first layer, (c, size) each.
    """

    coefficients: Tensor
    x: Tensor
    kernel: Tensor
    tail: list[Tensor]
    losses: NDArray[np.float64]
    bias: bool

    def rows(self) -> Tensor:
        """Return every device's clear update, shape (c, d), float32."""
        first = torch.bmm(self.coefficients.transpose(1, 2), self.x).flatten(1)
        parts = [first, self.coefficients.sum(1), *self.tail] if self.bias else [first, *self.tail]
        return torch.cat(parts, 1)

    def norms(self) -> NDArray[np.float64]:
        """Return every update's l2 norm, shape (c,): |U^T [X 1]|^2 = <U, K U>."""
        # By the kernel, since the update itself need not exist.
        squares = (self.coefficients * torch.bmm(self.kernel, self.coefficients)).sum((1, 2), dtype=torch.float64)
        for part in self.tail:
            squares += part.square().sum(1, dtype=torch.float64)
        # Rounding can make <U, K U> slightly negative.
        norms: NDArray[np.float64] = squares.clamp_(min=0.0).sqrt().cpu().numpy()
        return norms

    def add_to(self, total: Tensor, places: NDArray[np.int64], weights: NDArray[np.float32] | None) -> None:
        """Add the weighted sum of the updates at ``places`` to ``total`` (d,)."""
        device = total.device
        rows: slice | Tensor = torch.from_numpy(places).to(device)
        if (np.diff(places) == 1).all():
            rows = slice(int(places[0]), int(places[-1]) + 1)
        u, x = self.coefficients[rows], self.x[rows]
        weight = None if weights is None else torch.from_numpy(weights).to(device)
        if weight is not None:
            u = u * weight.view(-1, 1, 1)
        out, inputs = u.shape[2], x.shape[2]
        flat = u.reshape(-1, out)
        total[: out * inputs].view(out, inputs).addmm_(flat.T, x.reshape(-1, inputs))
        at = out * inputs
        if self.bias:
            total[at : at + out].add_(flat.sum(0))
            at += out
        for part in self.tail:
            mine = part[rows]
            total[at : at + part.shape[1]].add_(mine.sum(0) if weight is None else weight @ mine)
            at += part.shape[1]


@dataclass(slots=True)
class _First:
    """The first layer of a block in the dual form.

    Attributes:
        outputs: H0 + K u, shape (c, n, out), updated on demand; with mini-batches always H0.
        kernel: shape (c, n, n); u: coefficients, shape (c, n, out), zero at first.
    """

    outputs: Tensor
    kernel: Tensor
    u: Tensor
    lr: float
    local: LocalSettings
    moved: bool = False
    velocity: Tensor | None = None
    change: Tensor | None = None
    scale: float = 0.0

    def all_outputs(self) -> Tensor:
        """Return the outputs for all samples, shape (c, n, out), until the next step."""
        if self.change is not None:
            self.outputs.baddbmm_(self.kernel, self.change, alpha=self.scale)
            self.change = None
        return self.outputs

    def outputs_at(self, rows: Tensor) -> Tensor:
        """Return the outputs of the first devices for samples ``rows`` (a, b) of the flattened block: (a, b, out)."""
        n, out = self.u.shape[1:]
        flat = rows.flatten()
        start = self.outputs.view(-1, out).index_select(0, flat).view(*rows.shape, out)
        if not self.moved:
            return start
        kernel = self.kernel.reshape(-1, n).index_select(0, flat).view(*rows.shape, n)
        return start.baddbmm_(kernel, self.u[: len(rows)])

    def descend(self, below: Tensor, rows: Tensor | None) -> None:
        """Take a step: ``below`` (a, b, out) are the errors of samples ``rows``, of all samples where None."""
        self.moved = True
        u, mu = self.u[: len(below)], self.local.prox_mu
        self.change, self.scale = below, -self.lr
        if self.local.momentum:
            if self.velocity is None:
                self.velocity = torch.zeros_like(self.u)
            velocity = self.velocity[: len(below)].mul_(self.local.momentum)
            if mu:
                velocity.add_(u, alpha=mu)
            _scatter(velocity, below, rows, 1.0)
            self.change = velocity
            u.sub_(velocity, alpha=self.lr)
            return
        if mu:
            # The proximal term pulls the whole first layer back, so it shrinks every coefficient.
            if rows is None:
                self.change = below + mu * u
            u.mul_(1.0 - self.lr * mu)
        _scatter(u, below, rows, -self.lr)


def _scatter(target: Tensor, values: Tensor, rows: Tensor | None, alpha: float) -> None:
    if rows is None:
        target.add_(values, alpha=alpha)
    else:
        target.view(-1, target.shape[2]).index_add_(0, rows.flatten(), values.flatten(0, 1), alpha=alpha)


class Dual:
    """Trains linear regression, softmax regression and one hidden layer, without clipping.

    Args:
        network: the network to train; shelf: all devices' training data.
    """

    def __init__(self, network: Dense, shelf: Shelf) -> None:
        self.network = network
        self.bias = dense.has_bias(network)
        self.out = network.shapes[0][0]
        self.kernels = Kernels(shelf, bias=self.bias)

    def limits(self, candidates: int) -> tuple[int, int]:
        """Return the most devices and samples of a block."""
        return MOST_DEVICES, max(1, BLOCK_FLOATS // (self.out * candidates))

    def score(self, models: Tensor, block: Block) -> Scored:
        """Return the losses of ``models`` (k, d) on the block, and the first layer's outputs for `train`."""
        params = unflatten(self.network, models)
        k = len(models)
        pre = preactivations(self.network, params, block.x.flatten(0, 1))
        w, y = block.weights().double(), block.y.flatten()
        losses = torch.empty(len(w), k, dtype=torch.float64, device=w.device)
        hidden = pre.relu() if len(params) > 2 else pre
        for j in range(k):
            outputs = behind(self.network, params, hidden[:, j], j)
            sample = sample_losses(self.network.kind, outputs, y)[0]
            losses[:, j] = (sample.view(w.shape) * w).sum(1)
        return Scored(losses.cpu().numpy(), pre.view(*w.shape, k, -1))

    def train(
        self,
        models: Tensor,
        start: NDArray[np.int64],
        block: Block,
        orders: Sequence[Shuffler],
        local: LocalSettings,
        round_: int,
        pre: Tensor | None = None,
    ) -> Trained:
        """Train every device of the block: see `blocks.Trainer`; ``pre`` is from `Scored.of`, where there is one.

        Raises:
            UsageError: gradients are to be clipped, but the dual form never has one.
        """
        if local.clip:
            raise UsageError("the dual form can't clip gradients", hint="take trainer batched or auto")
        device = models.device
        params = unflatten(self.network, models)
        mini = schedule(block.lengths, local, orders, device) if local.batch_size else None
        sort = np.arange(len(start)) if mini is None else mini.by_steps
        kernel, x = self.kernels.of(block), block.x
        pre = self._start(params, start, block) if pre is None else pre
        y = block.y
        sorted_already = bool((sort == np.arange(len(sort))).all())
        index = torch.from_numpy(sort).to(device)
        if not sorted_already:  # indexing copies the kernels, which are large
            kernel, x, pre, y = kernel[index], x[index], pre[index], y[index]
        lr = step_size(local, round_)
        first = _First(pre, kernel, torch.zeros_like(pre), lr, local)
        behind_first = params[2:] if self.bias else params[1:]
        tail = Descent(dense.copies(behind_first, torch.from_numpy(start[sort]).to(device)), lr, local)
        losses = self._full(first, tail, y, block, local.steps) if mini is None else self._mini(first, tail, y, mini)
        trained = DualTrained(
            coefficients=first.u, x=x, kernel=kernel, tail=tail.changes(), losses=check_losses(losses), bias=self.bias
        )
        return trained if sorted_already else _restore(trained, index, sort)

    def _start(self, params: list[Tensor], start: NDArray[np.int64], block: Block) -> Tensor:
        """Return the first layer's outputs under each device's model, shape (c, n, out)."""
        pre = block.x.new_empty(*block.x.shape[:2], self.out)
        for row in np.unique(start):
            mine = torch.from_numpy(np.flatnonzero(start == row)).to(pre.device)
            part = [p[int(row) : int(row) + 1] for p in params]
            x = block.x if len(mine) == len(pre) else block.x[mine]
            outputs = preactivations(self.network, part, x.flatten(0, 1)).view(*x.shape[:2], self.out)
            if len(mine) == len(pre):
                return outputs
            pre[mine] = outputs
        return pre

    def _full(self, first: _First, tail: Descent, y: Tensor, block: Block, steps: int) -> NDArray[np.float64]:
        w = block.weights()
        total = torch.zeros(len(w), device=w.device)
        for _ in range(steps):
            factors, below, losses = dense.errors(self.network, tail.params, first.all_outputs(), y, w)
            first.descend(below, None)
            tail.step(factors, len(w))
            total += losses.sum(1)
        return total.double().cpu().numpy() / (block.lengths * steps)

    def _mini(self, first: _First, tail: Descent, y: Tensor, mini: Schedule) -> NDArray[np.float64]:
        c, n = y.shape
        base = (torch.arange(c, device=y.device) * n).unsqueeze(1)
        flat = y.flatten()
        total = torch.zeros(c, device=y.device)
        for rows, w, a in zip(mini.rows, mini.weights, mini.active.tolist(), strict=True):
            at = rows[:a] + base[:a]
            params = [p[:a] for p in tail.params]
            pre = first.outputs_at(at)
            factors, below, losses = dense.errors(
                self.network, params, pre, flat.index_select(0, at.flatten()).view(a, -1), w[:a]
            )
            first.descend(below, at)
            tail.step(factors, a)
            total[:a] += losses.sum(1)
        return total.double().cpu().numpy() / mini.visited


def _restore(trained: DualTrained, index: Tensor, sort: NDArray[np.int64]) -> DualTrained:
    """Return the updates in the block's own order: row i of ``trained`` is device ``sort[i]``."""
    back = torch.argsort(index)
    losses = np.empty_like(trained.losses)
    losses[sort] = trained.losses
    tail = [part[back] for part in trained.tail]
    return DualTrained(
        coefficients=trained.coefficients[back],
        x=trained.x[back],
        kernel=trained.kernel[back],
        tail=tail,
        losses=losses,
        bias=trained.bias,
    )
