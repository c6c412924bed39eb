"""A small CNN on all devices of a block at once: each convolution with its 2x2 pooling is one batched matrix product.

The four positions that one pooled pixel is the maximum of together cover a patch of k+1 by k+1 pixels. So a layer's patches
are extracted at every second pixel only, and its kernels are placed four times in such a patch, shifted to each position: one
product with four times the rows gives all four values, and their maximum is the pooled pixel. This multiplies by some zeros,
but moves far fewer patches, in products large enough to run at full speed. Samples are the last axis everywhere, so that
patches are copied, and values compared, in long contiguous runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from edge_client.learning.training import Shuffler
from shoal.protocol.documents import LocalSettings
from shoal.simulation.trainers import dense
from shoal.simulation.trainers.blocks import Block, Rows, check_losses, schedule, step_size
from shoal.simulation.trainers.dense import Descent
from shoal.simulation.trainers.networks import Cnn, unflatten

BLOCK_DEVICES: Final = 5
"""Devices of a block: the patches of a few stay in the cache between the steps of a layer."""


class Scratch:
    """Large tensors that every step overwrites: asking the system for fresh memory would cost more than the products."""

    def __init__(self) -> None:
        self._held: dict[str, Tensor] = {}

    def __call__(self, name: str, like: Tensor, *shape: int) -> Tensor:
        """Return the tensor ``name``, contiguous, of ``shape`` and on the device and of the type of ``like``; not cleared."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < size or held.device != like.device:
            held = self._held[name] = like.new_empty(size)
        return held[:size].view(shape)


@dataclass(frozen=True, slots=True)
class Convolved:
    """Trains `Cnn`, mini-batch or full batch."""

    network: Cnn
    scratch: Scratch = field(default_factory=Scratch, repr=False, compare=False)

    def limits(self, _candidates: int) -> tuple[int, int]:
        """Return the most devices and samples of a block."""
        return BLOCK_DEVICES, 1 << 20

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
        descent = Descent(params, step_size(local, round_), local)
        x, y = block.x.flatten(2).flatten(0, 1), block.y.flatten(0, 1)
        total = torch.zeros(len(start), device=models.device)
        width = block.x.shape[1]
        visited: NDArray[np.int64]
        if mini is None:
            samples = x.view(len(start), width, -1).transpose(1, 2).contiguous()
            labels, weights = y.view(len(start), width), block.weights()
            for _ in range(local.steps):
                total += self._step(descent, samples, labels, weights)
            visited = block.lengths * local.steps
        else:
            base = torch.from_numpy(sort * width).to(models.device).unsqueeze(1)
            for rows, weights, a in zip(mini.rows, mini.weights, mini.active.tolist(), strict=True):
                at = (rows[:a] + base[:a]).flatten()
                chosen = torch.index_select(x, 0, at, out=self.scratch("chosen", x, len(at), x.shape[1]))
                samples = self.scratch("samples", x, a, x.shape[1], len(at) // a)
                samples.copy_(chosen.view(a, -1, x.shape[1]).transpose(1, 2))
                total[:a] += self._step(descent, samples, y.index_select(0, at).view(a, -1), weights[:a])
            visited = mini.visited
        losses = np.empty(len(start))
        losses[sort] = total.double().cpu().numpy() / visited
        updates = torch.empty(len(start), models.shape[1], device=models.device)
        updates[torch.from_numpy(sort).to(models.device)] = torch.cat(descent.changes(), 1)
        return Rows(updates, check_losses(losses))

    def _step(self, descent: Descent, x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        """Take one step of the first a devices; return their summed losses (a,).

        Args:
            descent: the devices' parameters.
            x: shape (a, pixels, b).
            y: shape (a, b).
            w: each sample's weight, (a, b), 0 for padding.
        """
        network, a = self.network, len(x)
        params = [p[:a] for p in descent.params]
        padding = network.kernel // 2 if network.same else 0
        values = x.view(a, network.channels, network.side, network.side, -1)
        layers: list[_Pooled] = []
        for i in range(len(network.filters)):
            layers.append(_Pooled.forward(values, params[2 * i], params[2 * i + 1], padding, i, self.scratch))
            values = layers[-1].values
        at = 2 * len(network.filters)
        inputs = [values.flatten(1, 3)]
        for i in range(at, len(params), 2):
            outputs = torch.baddbmm(params[i + 1].unsqueeze(2), params[i], inputs[-1])
            inputs.append(outputs.relu_() if i + 2 < len(params) else outputs)
        error, losses = _errors(inputs.pop(), y, w)
        gradient: list[Tensor] = []
        for i in range(len(params) - 2, at - 1, -2):
            below = inputs.pop()
            gradient[:0] = [torch.bmm(error, below.transpose(1, 2)), error.sum(2)]
            if i > 0:
                error = torch.bmm(params[i].transpose(1, 2), error).mul_(below > 0)
        for i in range(len(layers) - 1, -1, -1):
            kernel, bias, errors = layers.pop().backward(error, params[2 * i], self.scratch)
            gradient[:0] = [kernel, bias]
            if errors is not None:
                error = errors.mul_(layers[-1].values > 0).flatten(1, 3)
        descent.apply(gradient, a)
        return losses.sum(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Pooled:
    """A convolution, pooled by 2x2, with ReLU, of a devices' b samples.

    Attributes:
        patches: shape (a, in * (k + 1)^2, h * w * b).
        right: 1 if the second of positions (0, 0) and (0, 1), then of (1, 0) and (1, 1), is larger, else 0; shape
            (2, a, out, h * w * b), float32, since products of different dtypes are slow.
        lower: 1 if the maximum is in the second row, (a, out, h * w * b).
        values: shape (a, out, h, w, b).
        padded: side of the padded input; padding: on each side.
        level: 0 for the layer that sees the images.
    """

    patches: Tensor
    right: Tensor
    lower: Tensor
    values: Tensor
    padded: int
    padding: int
    level: int

    @classmethod
    def forward(cls, x: Tensor, kernels: Tensor, bias: Tensor, padding: int, level: int, scratch: Scratch) -> _Pooled:
        """Return the layer's outputs for x (a, in, side, side, b).

        Args:
            x: inputs.
            kernels: shape (a, out, in, k, k).
            bias: shape (a, out).
            padding: zeros around x.
            level: counted from 0.
            scratch: memory.
        """
        a, out, _, k, _ = kernels.shape
        if padding:
            x = functional.pad(x, (0, 0, padding, padding, padding, padding))
        cells = x.unfold(2, k + 1, 2).unfold(3, k + 1, 2)
        h, b = cells.shape[2], x.shape[4]
        columns = h * h * b
        patches = scratch(f"patches {level}", x, *cells.permute(0, 1, 5, 6, 2, 3, 4).shape)
        patches.copy_(cells.permute(0, 1, 5, 6, 2, 3, 4))
        patches = patches.view(a, -1, columns)
        places = scratch("places", x, a, 4, out, columns)
        torch.bmm(_laid(kernels), patches, out=places.view(a, 4 * out, columns))
        right = scratch(f"right {level}", x, 2, a, out, columns)
        for row in range(2):
            torch.gt(places[:, 2 * row + 1], places[:, 2 * row], out=right[row])
        upper = torch.maximum(places[:, 0], places[:, 1], out=scratch("upper", x, a, out, columns))
        below = torch.maximum(places[:, 2], places[:, 3], out=scratch("below", x, a, out, columns))
        values = torch.maximum(upper, below, out=scratch(f"values {level}", x, a, out, columns))
        lower = torch.gt(below, upper, out=scratch(f"lower {level}", x, a, out, columns))
        values.add_(bias.unsqueeze(2)).relu_()
        return cls(
            patches=patches,
            right=right,
            lower=lower,
            values=values.view(a, out, h, h, b),
            padded=x.shape[2],
            padding=padding,
            level=level,
        )

    def backward(self, error: Tensor, kernels: Tensor, scratch: Scratch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Return the gradients of kernels and bias, and the errors of the inputs (a, in, side, side, b) if they count.

        Args:
            error: error of the input of ReLU, shape (a, out * h * w, b) or one that reshapes to it.
            kernels: as they were in `forward`.
            scratch: memory.
        """
        a, out, channels, k, _ = kernels.shape
        g = error.reshape(a, out, -1)
        parted = scratch("places", g, a, 4, out, g.shape[2])
        below = torch.mul(g, self.lower, out=scratch("below", g, *g.shape))
        above = torch.sub(g, below, out=scratch("upper", g, *g.shape))
        for row, both in enumerate((above, below)):
            second = torch.mul(both, self.right[row], out=parted[:, 2 * row + 1])
            torch.sub(both, second, out=parted[:, 2 * row])
        parted = parted.view(a, 4 * out, -1)
        kernel = _lifted(torch.bmm(parted, self.patches.transpose(1, 2)), kernels.shape)
        if self.level == 0:
            return kernel, g.sum(2), None
        h, b = self.values.shape[2], self.values.shape[4]
        cells = scratch("cells", g, a, channels, k + 1, k + 1, h, h, b)
        torch.bmm(_laid(kernels).transpose(1, 2), parted, out=cells.view(a, -1, h * h * b))
        whole = scratch(f"errors {self.level}", g, a, channels, self.padded, self.padded, b).zero_()
        for i in range(k + 1):
            for j in range(k + 1):
                whole[:, :, i : i + 2 * h - 1 : 2, j : j + 2 * h - 1 : 2] += cells[:, :, i, j]
        inside = slice(self.padding, self.padded - self.padding)
        return kernel, g.sum(2), whole[:, :, inside, inside]


def _laid(kernels: Tensor) -> Tensor:
    """Return kernels (a, out, in, k, k) laid four times into patches: (a, 4 * out, in * (k + 1)^2)."""
    a, out, channels, k, _ = kernels.shape
    laid = kernels.new_zeros(a, 4, out, channels, k + 1, k + 1)
    for place in range(4):
        i, j = divmod(place, 2)
        laid[:, place, :, :, i : i + k, j : j + k] = kernels
    return laid.view(a, 4 * out, -1)


def _lifted(laid: Tensor, shape: Sequence[int]) -> Tensor:
    """Return the gradient of the kernels, ``shape``, from that of how `_laid` lays them."""
    a, out, channels, k, _ = shape
    patches = laid.view(a, 4, out, channels, k + 1, k + 1)
    total = patches[:, 0, :, :, :k, :k].clone()
    for place in range(1, 4):
        i, j = divmod(place, 2)
        total += patches[:, place, :, :, i : i + k, j : j + k]
    return total


def _errors(outputs: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted errors of the logits (a, classes, b), which are overwritten, and the losses (a, b), 0 for padding."""
    log_p = torch.log_softmax(outputs, 1)
    index = y.unsqueeze(1)
    losses = log_p.gather(1, index).squeeze(1).neg_().mul_(w > 0)
    top = log_p.exp_()
    top.scatter_add_(1, index, torch.full_like(index, -1.0, dtype=top.dtype))
    return top.mul_(w.unsqueeze(1)), losses
