"""A small CNN on all devices of a block at once: each convolution with its 2x2 pooling is one batched matrix product.

The four positions that one pooled pixel is the maximum of together cover a patch of k+1 by k+1 pixels. So a layer's patches
are extracted at every second pixel only, and its kernels are placed four times in such a patch, shifted to each position: one
product with four times the rows gives all four values, and their maximum is the pooled pixel. This multiplies by some zeros,
but moves far fewer patches, in products large enough to run at full speed.

Samples are the last axis everywhere. The inputs of a layer are first sorted by the parity of their row and column: pixel
(2r + q, 2c + s) goes to place (r, c) of plane (q, s). A patch's pixel (i, j) at all of a row's patches is then one contiguous
run of a plane, and so is its error on the way back: patches are copied, and errors added up, by rows instead of by pixels.

    plane (0, 0)   plane (0, 1)      image of 4 x 4
    a c            b d               a b c d
    i k            j l               e f g h
    plane (1, 0)   plane (1, 1)      i j k l
    e g            f h               m n o p
    m o            n p
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_client.learning.training import Shuffler
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.trainers import dense
from shoal.simulation.trainers.blocks import Block, Limits, Rows, Schedule, check_losses, schedule, step_size
from shoal.simulation.trainers.dense import Descent, Factors
from shoal.simulation.trainers.networks import Cnn, unflatten

BLOCK_DEVICES: Final = 5
"""Devices of a block: the patches of a few stay in the cache between the steps of a layer."""


threshold_backward: Final = torch.ops.aten.threshold_backward.grad_input
"""The gradient of ReLU in one pass and in place, where ``error.mul_(values > 0)`` makes two and a tensor."""


class Scratch:
    """Large tensors that every step overwrites: asking the system for fresh memory would cost more than the products."""

    def __init__(self, like: Tensor) -> None:
        self._like = like
        self._held: dict[str, Tensor] = {}

    def __call__(self, name: str, *shape: int) -> Tensor:
        """Return the tensor ``name``, contiguous and of ``shape``; it is not cleared, and all of its users share memory."""
        size = math.prod(shape)
        held = self._held.get(name)
        if held is None or held.numel() < size:
            held = self._held[name] = self._like.new_empty(size)
        return held[:size].view(shape)


class Convolved:
    """Trains `Cnn`, mini-batch or full batch.

    Args:
        network: the network that devices train.
    """

    def __init__(self, network: Cnn) -> None:
        self.network = network
        self._size: tuple[Any, ...] = ()
        self._passes: dict[int, _Pass] = {}
        self._scratch: Scratch | None = None

    def limits(self, _candidates: int, _local: LocalTraining) -> Limits:
        """Return the limits of a block."""
        return Limits(BLOCK_DEVICES)

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
        mini = schedule(block.lengths, local, orders, models.device) if local.batch_size else None
        sort = np.arange(len(start)) if mini is None else mini.by_steps
        params = dense.copies(unflatten(self.network, models), torch.from_numpy(start[sort]).to(models.device))
        descent = Descent(params, step_size(local, round_), local)
        x, y = block.x.flatten(2), block.y
        losses = np.empty(len(start))
        if mini is None:
            losses[:] = self._full(descent, x, y.unsqueeze(1), block.weights().unsqueeze(1), local.steps)
            losses /= block.lengths * local.steps
        else:
            losses[sort] = self._mini(descent, x, y, mini) / mini.visited
        updates = torch.empty(len(start), models.shape[1], device=models.device)
        updates[torch.from_numpy(sort).to(models.device)] = torch.cat(descent.changes(), 1)
        return Rows(updates, check_losses(losses))

    def _full(self, descent: Descent, x: Tensor, y: Tensor, w: Tensor, steps: int) -> NDArray[np.float64]:
        step = self._pass(len(x), x.shape[1], x)
        step.x.copy_(x)
        logs = torch.empty(steps, *y.shape, device=x.device)
        for each in logs:
            step(descent, y, w, each)
        return _summed(logs, w)

    def _mini(self, descent: Descent, x: Tensor, y: Tensor, mini: Schedule) -> NDArray[np.float64]:
        flat = x.flatten(0, 1)
        base = torch.from_numpy(mini.by_steps * x.shape[1]).to(x.device).view(1, -1, 1)
        rows = mini.rows + base
        labels, weights = y.flatten()[rows].unsqueeze(2), mini.weights.unsqueeze(2)
        logs = torch.zeros_like(weights)
        for i, a in enumerate(mini.active.tolist()):
            step = self._pass(a, rows.shape[2], x)
            torch.index_select(flat, 0, rows[i, :a].flatten(), out=step.x.flatten(0, 1))
            step(descent, labels[i, :a], weights[i, :a], logs[i, :a])
        return _summed(logs, weights)

    def _pass(self, a: int, b: int, like: Tensor) -> _Pass:
        """Return the memory of a step of ``a`` devices with ``b`` samples each; a block of another size gets new memory."""
        size = (len(like), b, like.device)
        if size != self._size:
            self._size, self._passes, self._scratch = size, {}, Scratch(like)
        if a not in self._passes:
            assert self._scratch is not None
            self._passes[a] = _Pass(self.network, a, b, self._scratch)
        return self._passes[a]


class _Pass:
    """A step of the first a devices of a block with b samples each.

    Attributes:
        x: their samples, shape (a, b, pixels), which the caller fills in.
    """

    def __init__(self, network: Cnn, a: int, b: int, scratch: Scratch) -> None:
        self.x = scratch("x", a, b, network.channels * network.side**2)
        values = self.x.transpose(1, 2).view(a, network.channels, network.side, network.side, b)
        self._layers: list[_Pooled] = []
        for level, filters in enumerate(network.filters):
            layer = _Pooled(network, level, values, filters, scratch)
            self._layers.append(layer)
            values = layer.values
        self._flat = values.flatten(1, 3)
        self._minus = self.x.new_full((a, 1, b), -1.0)

    def __call__(self, descent: Descent, y: Tensor, w: Tensor, logs: Tensor) -> None:
        """Take the step.

        Args:
            descent: the parameters of these devices and further ones.
            y: shape (a, 1, b).
            w: each sample's weight, (a, 1, b), 0 for padding.
            logs: shape (a, 1, b), receives the logarithm of each label's probability.
        """
        a, at = len(self.x), 2 * len(self._layers)
        params = descent.params if len(descent.params[0]) == a else [p[:a] for p in descent.params]
        for i, layer in enumerate(self._layers):
            layer.forward(params[2 * i], params[2 * i + 1])
        inputs = [self._flat]
        for i in range(at, len(params), 2):
            outputs = torch.baddbmm(params[i + 1].unsqueeze(2), params[i], inputs[-1])
            inputs.append(outputs.relu_() if i + 2 < len(params) else outputs)
        log_p = torch.log_softmax(inputs.pop(), 1)
        torch.gather(log_p, 1, y, out=logs)
        error = log_p.exp_().scatter_add_(1, y, self._minus).mul_(w)
        factors: Factors = []
        for i in range(len(params) - 2, at - 1, -2):
            below = inputs.pop()
            factors.insert(0, (error.transpose(1, 2), below.transpose(1, 2)))
            error = torch.bmm(params[i].transpose(1, 2), error)
            threshold_backward(error, below, 0.0, grad_input=error)
        gradient: list[Tensor] = []
        for layer in reversed(self._layers):
            gradient[:0] = layer.backward(error)
            error = layer.errors
        descent.step(factors, a, gradient)


class _Pooled:
    """A convolution, pooled by 2x2, with ReLU, of a devices' b samples: its memory, and all views of it that a step needs.

    Making a view costs as much as a small sum, and a step needs hundreds, so they are made once.

    Attributes:
        values: outputs, shape (a, out, h, h, b).
        errors: errors of the inputs before their ReLU, shape (a, in, side, side, b); empty for the layer that sees the images.
    """

    def __init__(self, network: Cnn, level: int, x: Tensor, out: int, scratch: Scratch) -> None:
        """Prepare the layer ``level``, counted from 0, of ``out`` filters, whose inputs x (a, in, side, side, b) will be."""
        a, channels, side, _, b = x.shape
        k = network.kernel
        padding = k // 2 if network.same else 0
        h, taps = (side + 2 * padding - k + 1) // 2, k // 2 + 1
        half = max(h + taps - 1, -(-(side + 2 * padding) // 2))
        columns, u = h * h * b, 2 * taps
        # Memory of its own, since the padding is cleared here once.
        self._planes = x.new_zeros(a, channels, 2, 2, half, half, b)
        self._inputs = _by_parity(self._planes, x, padding)
        # Rows (i, j) of a patch are (2p + q, 2t + s): plane (q, s), moved by (p, t). A row's h * b numbers follow each other.
        *outer, q, s, row, column, _ = self._planes.stride()
        shape, strides = (a, channels, taps, 2, taps, 2, h, h * b), (*outer, row, q, column, s, row, 1)
        self._runs = self._planes.as_strided(shape, strides)
        self._patches = scratch(f"patches {level}", *shape)
        self._matrix = self._patches.view(a, -1, columns)
        laid = x.new_zeros(a, 2, 2, out, channels, u, u)
        self._laid = laid.view(a, 4 * out, -1)
        # The kernels in the patch of each position (i, j), moved by i rows and j columns.
        *outer, i, j, filters, channel, row, column = laid.stride()
        self._shifted = laid.as_strided(
            (a, out, channels, k, k, 2, 2), (*outer, filters, channel, row, column, i + row, j + column)
        )
        four = scratch("places", a, 2, 2, out, columns)
        self._four, self._left, self._right = four.view(a, 4 * out, columns), four[:, :, 0], four[:, :, 1]
        self._rows = scratch("rows", a, 2, out, columns)
        self._upper, self._lower = self._rows[:, 0], self._rows[:, 1]
        # 1 where the right one of two neighbours is larger, and where the lower row is, else 0; float32, since products of
        # different dtypes are slow.
        self._is_right = scratch(f"right {level}", a, 2, out, columns)
        self._is_lower = scratch(f"lower {level}", a, out, columns)
        self._values = scratch(f"values {level}", a, out, columns)
        self.values = self._values.view(a, out, h, h, b)
        moved = scratch(f"laid gradient {level}", *laid.shape)
        self._moved = moved.view(self._laid.shape)
        self._moved_rows = moved[:, 0, ..., :k, :], moved[:, 1, ..., 1 : k + 1, :]
        half_lifted = scratch("half lifted", a, 2, out, channels, k, u)
        self._half_lifted = half_lifted
        self._moved_columns = half_lifted[:, 0, ..., :k], half_lifted[:, 1, ..., 1 : k + 1]
        self.errors = x.new_empty(0)
        if level == 0:
            return
        cells = scratch("cells", a, channels, taps, 2, taps, 2, h, h, b)
        self._cells = cells.view(a, -1, columns)
        self._plane_errors = scratch(f"plane errors {level}", *self._planes.shape)
        self._folds = [
            (self._plane_errors[:, :, :, :, p : p + h, t : t + h], cells[:, :, p, :, t])
            for p in range(taps)
            for t in range(taps)
        ]
        self.errors = scratch(f"errors {level}", *x.shape)
        self._outputs = _by_parity(self._plane_errors, self.errors, padding)

    def forward(self, kernels: Tensor, bias: Tensor) -> None:
        """Compute ``values`` from the inputs, kernels (a, out, in, k, k) and bias (a, out)."""
        for plane, pixels in self._inputs:
            plane.copy_(pixels)
        self._patches.copy_(self._runs)
        self._shifted.copy_(kernels[..., None, None])
        torch.bmm(self._laid, self._matrix, out=self._four)
        torch.gt(self._right, self._left, out=self._is_right)
        torch.maximum(self._left, self._right, out=self._rows)
        torch.gt(self._lower, self._upper, out=self._is_lower)
        torch.maximum(self._upper, self._lower, out=self._values)
        self._values.add_(bias.unsqueeze(2)).relu_()

    def backward(self, error: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of kernels and bias, and compute ``errors`` unless the layer sees the images.

        Args:
            error: error of the input of ReLU, of the shape of ``values`` or one that reshapes to it.
        """
        g = error.reshape(self._values.shape)
        torch.mul(g, self._is_lower, out=self._lower)
        torch.sub(g, self._lower, out=self._upper)
        torch.mul(self._rows, self._is_right, out=self._right)
        torch.sub(self._rows, self._right, out=self._left)
        torch.bmm(self._four, self._matrix.transpose(1, 2), out=self._moved)
        torch.add(*self._moved_rows, out=self._half_lifted)
        kernels = torch.add(*self._moved_columns)
        if self.errors.numel():
            torch.bmm(self._laid.transpose(1, 2), self._four, out=self._cells)
            self._plane_errors.zero_()
            for patch, cell in self._folds:
                patch.add_(cell)
            # The planes hold the outputs of the layer below, so they tell where its ReLU is flat.
            threshold_backward(self._plane_errors, self._planes, 0.0, grad_input=self._plane_errors)
            for plane, pixels in self._outputs:
                pixels.copy_(plane)
        return kernels, g.sum(2)


def _by_parity(planes: Tensor, image: Tensor, padding: int) -> list[tuple[Tensor, Tensor]]:
    """Return views of planes (a, c, 2, 2, half, half, b), without padding, and of the pixels of (a, c, side, side, b) in them."""
    side = image.shape[2]
    if side % 2 == 0 and padding % 2 == 0:  # all four at once
        inside = slice(padding // 2, (padding + side) // 2)
        a, channels, *_, b = image.shape
        pixels = image.view(a, channels, side // 2, 2, side // 2, 2, b).permute(0, 1, 3, 5, 2, 4, 6)
        return [(planes[:, :, :, :, inside, inside], pixels)]
    found = []
    for q in range(2):
        for s in range(2):
            # The first row and column of the image in this plane, and their places there, which count the padding.
            y, x = (q - padding) % 2, (s - padding) % 2
            pixels = image[:, :, y::2, x::2]
            row, column = (y + padding) // 2, (x + padding) // 2
            plane = planes[:, :, q, s, row : row + pixels.shape[2], column : column + pixels.shape[3]]
            found.append((plane, pixels))
    return found


def _summed(logs: Tensor, weights: Tensor) -> NDArray[np.float64]:
    """Return each device's loss over all steps (c,) from `_Pass`'s logs (steps, c, 1, b); weights of 0 mark padding."""
    found: NDArray[np.float64] = (logs * (weights > 0)).sum((0, 2, 3), dtype=torch.float64).neg_().cpu().numpy()
    return found
