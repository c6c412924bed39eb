"""Dense networks, all devices of a block at once; with few samples, the first layer moves without its weights.

Every gradient of W1 and b1 is A^T [X 1], with A (n, out) the first layer's errors of the samples used, so that after
any number of steps, also with momentum and a proximal term (they are linear), W1 = W1_0 + U^T X and b1 = b1_0 + U^T 1
for some U (n, out). The first layer's outputs are then X W1^T + b1 = H0 + K U, with H0 the outputs of the model that the
device started from and K = X X^T + 1. K (n, n) is computed once for all rounds and a step costs n/inputs of the usual
one. The weighted sum of many devices' updates is one matrix product, without computing single updates.

That is the dual form. Where a device has more samples than a sample has inputs, K would take more memory than its data,
and clipping needs the gradient itself. The device then has weights of its own, and a step is one batched product for all.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_client.learning.training import Shuffler
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.trainers import dense
from shoal.simulation.trainers.blocks import (
    SIZE_RATIO,
    UPDATE_FLOATS,
    Block,
    Limits,
    Rows,
    Schedule,
    Shelf,
    Trained,
    check_losses,
    devices_within,
    schedule,
    step_size,
)
from shoal.simulation.trainers.dense import Dense, Descent, Factors
from shoal.simulation.trainers.networks import sample_losses, unflatten
from shoal.simulation.trainers.scoring import behind, preactivations

KERNEL_BYTES: Final = 1 << 30
"""Memory for kernels that are cached between rounds; those of further devices are computed again every round."""
BLOCK_FLOATS: Final = 1_300_000
"""First-layer outputs of all candidates that a block holds: 5 MB, for they are read again right after."""
DATA_FLOATS: Final = 64_000_000
"""Inputs of all samples that a block holds, padding included: 256 MB."""
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
class _Spanned:
    """The first layer of a block in the dual form.

    Attributes:
        start: H0 of the block, shape (c, n, out); with full batches, the outputs after the last step.
        kernel: shape (c, n, n).
        u: coefficients, shape (c, n, out), zero at first, devices in the order of training.
    """

    start: Tensor
    kernel: Tensor
    u: Tensor
    lr: float
    local: LocalTraining
    moved: bool = False
    velocity: Tensor | None = None
    change: Tensor | None = None

    def outputs(self, at: Tensor | None) -> Tensor:
        """Return the outputs (a, b, out) for samples ``at`` (a, b) of the flattened block; for all samples where None."""
        if at is None:
            if self.change is not None:
                self.start.baddbmm_(self.kernel, self.change, alpha=-self.lr)
            return self.start
        start = _rows(self.start, at)
        return start.baddbmm_(_rows(self.kernel, at), self.u[: len(at)]) if self.moved else start

    def descend(self, below: Tensor, own: Tensor | None) -> Factors:
        """Take a step, which leaves no factors to apply.

        Args:
            below: errors of some samples, shape (a, b, out).
            own: where these samples are in the flattened u, shape (a, b); all samples where None.
        """
        self.moved = True
        u, mu = self.u[: len(below)], self.local.prox_mu
        self.change = below
        if self.local.momentum:
            if self.velocity is None:
                self.velocity = torch.zeros_like(self.u)
            velocity = self.velocity[: len(below)].mul_(self.local.momentum)
            if mu:
                velocity.add_(u, alpha=mu)
            _scatter(velocity, below, own, 1.0)
            self.change = velocity
            u.sub_(velocity, alpha=self.lr)
            return []
        if mu:
            # The proximal term pulls the whole first layer back, so it shrinks every coefficient.
            if own is None:
                self.change = below + mu * u
            u.mul_(1.0 - self.lr * mu)
        _scatter(u, below, own, -self.lr)
        return []


@dataclass(slots=True)
class _Weighed:
    """The first layer of a block by each device's own weights.

    Attributes:
        params: of all layers, (c, *shape) each, devices in the order of training.
        x: the block's samples, shape (c, n, inputs); seen: those of the last step.
    """

    params: list[Tensor]
    x: Tensor
    bias: bool
    seen: Tensor

    def outputs(self, at: Tensor | None) -> Tensor:
        """Return the outputs (a, b, out) for samples ``at`` (a, b) of the flattened block; for all samples where None."""
        self.seen = self.x if at is None else _rows(self.x, at)
        return dense.first_layer([p[: len(self.seen)] for p in self.params[:2]], self.seen, bias=self.bias)

    def descend(self, below: Tensor, _own: Tensor | None) -> Factors:
        """Return the factors of the gradient, from which `Descent` takes the step together with the other layers."""
        return [(below, self.seen)]


def _rows(values: Tensor, at: Tensor) -> Tensor:
    return values.flatten(0, 1).index_select(0, at.flatten()).view(*at.shape, values.shape[2])


def _scatter(target: Tensor, values: Tensor, rows: Tensor | None, alpha: float) -> None:
    if rows is None:
        target.add_(values, alpha=alpha)
    else:
        target.view(-1, target.shape[2]).index_add_(0, rows.flatten(), values.flatten(0, 1), alpha=alpha)


class Dual:
    """Trains linear regression, softmax regression and one hidden layer.

    Args:
        network: the network to train; shelf: all devices' training data.
    """

    def __init__(self, network: Dense, shelf: Shelf) -> None:
        self.network = network
        self.bias = dense.has_bias(network)
        self.out, self.inputs = network.shapes[0]
        self.kernels = Kernels(shelf, bias=self.bias)

    def limits(self, candidates: int, local: LocalTraining) -> Limits:
        """Return the limits of a block, in which either all devices have a kernel or none."""
        return Limits(
            devices_within(UPDATE_FLOATS, self.network.length, MOST_DEVICES),
            max(1, min(BLOCK_FLOATS // (self.out * candidates), DATA_FLOATS // self.inputs)),
            # A kernel should be no larger than its samples, and clipping needs the gradient.
            edge=0 if local.clip else self.inputs,
            # Mini-batches are drawn from the true samples, so that padding costs memory only.
            ratio=math.inf if local.batch_size else SIZE_RATIO,
        )

    def spans(self, block: Block, local: LocalTraining) -> bool:
        """Return whether the first layer moves in the dual form."""
        return block.x.shape[1] <= self.limits(1, local).edge

    def score(self, models: Tensor, block: Block) -> Scored:
        """Return the losses of ``models`` (k, d) on the block, and the first layer's outputs, from which `train` can start."""
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
        local: LocalTraining,
        round_: int,
        pre: Tensor | None = None,
    ) -> Trained:
        """Train every device of the block: see `blocks.Trainer`.

        ``pre`` is from `Scored.of`, where there is one; without the dual form it is not used.
        """
        params = unflatten(self.network, models)
        mini = schedule(block.lengths, local, orders, models.device) if local.batch_size else None
        sort = np.arange(len(start)) if mini is None else mini.by_steps
        lr, spans = step_size(local, round_), self.spans(block, local)
        after_first = params[2:] if self.bias else params[1:]
        own = dense.copies(after_first if spans else params, torch.from_numpy(start[sort]).to(models.device))
        descent = Descent(own, lr, local, self.bias)
        first: _Spanned | _Weighed = _Weighed(own, block.x, self.bias, block.x)
        if spans:
            pre = self._start(params, start, block) if pre is None else pre
            first = _Spanned(pre, self.kernels.of(block), torch.zeros_like(pre), lr, local)
        losses = np.empty(len(start))
        losses[sort] = self._descend(first, descent, block, local, mini)
        check_losses(losses)
        back: slice | Tensor = slice(None)
        if (sort != np.arange(len(sort))).any():
            back = torch.from_numpy(np.argsort(sort)).to(models.device)
        changes = [part[back] for part in descent.changes()]
        if isinstance(first, _Weighed):
            return Rows(torch.cat(changes, 1), losses)
        return DualTrained(
            coefficients=first.u[back], x=block.x, kernel=first.kernel, tail=changes, losses=losses, bias=self.bias
        )

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

    def _descend(
        self, first: _Spanned | _Weighed, descent: Descent, block: Block, local: LocalTraining, mini: Schedule | None
    ) -> NDArray[np.float64]:
        """Take all steps; return each device's mean loss over the samples it visited (c,), in the order of training."""
        total = torch.zeros(len(block.lengths), device=block.x.device)
        for at, own, w in _batches(block, local, mini):
            y = block.y if at is None else block.y.flatten()[at]
            tail = [p[: len(w)] for p in descent.params[-2:]]
            factors, below, losses = dense.errors(self.network, tail, first.outputs(at), y, w)
            descent.step([*first.descend(below, own), *factors], len(w))
            total[: len(w)] += losses.sum(1)
        sums: NDArray[np.float64] = total.double().cpu().numpy()
        return sums / (block.lengths * local.steps if mini is None else mini.visited)


def _batches(
    block: Block, local: LocalTraining, mini: Schedule | None
) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor]]:
    """Yield each step's samples as rows of the flattened block (a, b) and in the order of training, and their weights (a, b).

    The rows are None where a step takes all samples.
    """
    if mini is None:
        yield from repeat((None, None, block.weights()), local.steps)
        return
    count, n = block.x.shape[:2]
    place = torch.from_numpy(mini.by_steps * n).to(block.x.device).unsqueeze(1)
    turn = torch.arange(0, count * n, n, device=block.x.device).unsqueeze(1)
    for rows, weights, a in zip(mini.rows, mini.weights, mini.active.tolist(), strict=True):
        yield rows[:a] + place[:a], rows[:a] + turn[:a], weights[:a]
