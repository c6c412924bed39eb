"""One device after another in numpy, mini-batch by mini-batch: for devices of very different sizes, as in power-law splits.

Blocks of padded devices gain nothing if a round has twenty devices with ten to a thousand samples: the products of a step are
small, and its cost is mostly the number of calls. This trainer makes few calls, and has two forms of the first layer. With the
weights W1 a step is the usual one. The other form stores U (n, out) with W1 = W1_0 + U^T X and b1 = b1_0 + U^T 1, and needs
only the n x n kernel X X^T + 1 (`shoal.simulation.trainers.dual` explains it); that pays while n is below twice the inputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from edge_client.learning.training import Shuffler
from shoal.protocol.documents import LocalSettings
from shoal.simulation.trainers.batched import Batched
from shoal.simulation.trainers.blocks import Block, Rows, check_losses, devices_within, step_size
from shoal.simulation.trainers.networks import OneHidden, Softmax, unflatten

UPDATE_FLOATS: Final = 4_000_000
"""Coordinates that the updates of a block may have together: 16 MB. Blocks gain nothing but fewer sums of updates."""
KERNEL_BYTES: Final = 256 << 20
"""Memory for kernels that are cached between rounds; those of further devices are computed again."""
KERNEL_RATIO: Final = 2.0
"""Samples in units of the inputs up to which the kernel's form is the faster one."""

Array = NDArray[np.float32]


@dataclass(slots=True)
class _Kernels:
    """X X^T + 1 of the devices met so far, by place."""

    left: int = KERNEL_BYTES
    own: dict[int, Array] = field(default_factory=dict)

    def of(self, place: int, x: Array) -> Array:
        """Return the kernel (n, n) of the device at ``place``, whose samples x (n, inputs) are."""
        kernel = self.own.get(place)
        if kernel is None:
            kernel = x @ x.T
            kernel += np.float32(1.0)
            if kernel.nbytes <= self.left:
                self.left -= kernel.nbytes
                self.own[place] = kernel
        return kernel


class _Weights:
    """The first layer by its weights."""

    def __init__(self, x: Array, weight: Array, bias: Array, lr: float, shrink: float) -> None:
        self._x, self._lr, self._shrink = x, np.float32(lr), np.float32(shrink)
        self._start, self._start_bias = weight, bias
        self._weight, self._bias = np.ascontiguousarray(weight.T), bias.copy()
        self._pull, self._pull_bias = self._weight * self._shrink, bias * self._shrink
        self._rows = x

    def begin(self, order: NDArray[np.int64]) -> None:
        """Start a pass over the samples in ``order`` (n,)."""
        self._rows = self._x[order]

    def forward(self, at: int, to: int) -> Array:
        """Return the first layer's outputs (b, out) of the samples ``at`` to ``to`` of this pass's order."""
        outputs: Array = np.dot(self._rows[at:to], self._weight)
        outputs += self._bias
        return outputs

    def step(self, at: int, to: int, errors: Array) -> None:
        """Take a step of the first layer along the errors (b, out) of the same samples; ``errors`` is overwritten."""
        errors *= self._lr
        if self._shrink:
            self._weight *= 1 - self._shrink
            self._weight += self._pull
            self._bias *= 1 - self._shrink
            self._bias += self._pull_bias
        self._weight -= np.dot(self._rows[at:to].T, errors)
        self._bias -= np.add.reduce(errors, 0)

    def changes(self) -> tuple[Array, Array]:
        """Return how far W1 (out, inputs) and b1 (out,) have moved."""
        return self._weight.T - self._start, self._bias - self._start_bias


class _Dual:
    """The first layer by U: see the module."""

    def __init__(self, *, x: Array, kernel: Array, weight: Array, bias: Array, lr: float, shrink: float) -> None:
        self._x, self._kernel, self._lr, self._shrink = x, kernel, np.float32(lr), np.float32(shrink)
        self._first: Array = np.dot(x, weight.T)
        self._first += bias
        self._u = np.zeros_like(self._first)
        self._order: NDArray[np.int64] = np.arange(len(x))
        self._rows, self._outputs = kernel, self._first

    def begin(self, order: NDArray[np.int64]) -> None:
        """Start a pass over the samples in ``order`` (n,)."""
        self._order = order
        self._rows, self._outputs = self._kernel.take(order, 0), self._first.take(order, 0)

    def forward(self, at: int, to: int) -> Array:
        """Return the first layer's outputs (b, out) of the samples ``at`` to ``to`` of this pass's order."""
        outputs: Array = np.dot(self._rows[at:to], self._u)
        outputs += self._outputs[at:to]
        return outputs

    def step(self, at: int, to: int, errors: Array) -> None:
        """Take a step of the first layer along the errors (b, out) of the same samples; ``errors`` is overwritten."""
        errors *= self._lr
        if self._shrink:
            self._u *= 1 - self._shrink
        self._u[self._order[at:to]] -= errors

    def changes(self) -> tuple[Array, Array]:
        """Return how far W1 (out, inputs) and b1 (out,) have moved."""
        return np.dot(self._u.T, self._x), np.add.reduce(self._u, 0)


class _Output:
    """Softmax and cross entropy of one device's batches."""

    def __init__(self, y: NDArray[np.int64], size: int, classes: int, passes: int) -> None:
        count = len(y)
        self._y, self._in_batch = y, np.arange(count) % size * classes
        self._mark: Array = np.eye(classes, dtype=np.float32)[y]
        self._ones, self._index = self._mark, self._in_batch
        self._sums, self._own = np.empty(passes * count, np.float32), np.empty(passes * count, np.float32)
        self._seen = 0

    def begin(self, order: NDArray[np.int64]) -> None:
        """Start a pass over the samples in ``order`` (n,)."""
        self._ones, self._index = self._mark.take(order, 0), self._y.take(order) + self._in_batch

    def errors(self, at: int, to: int, outputs: Array) -> Array:
        """Return the outputs' errors (b, classes), each sample's weighted 1 / b, in the place of ``outputs``; note the losses."""
        seen, until = self._seen, self._seen + to - at
        # The largest output becomes 0, so that exp can't overflow.
        outputs -= np.maximum.reduce(outputs, 1, keepdims=True)
        self._own[seen:until] = outputs.take(self._index[at:to])
        np.exp(outputs, outputs)
        sums = np.add.reduce(outputs, 1, keepdims=True)
        self._sums[seen:until] = sums[:, 0]
        outputs /= sums
        outputs -= self._ones[at:to]
        outputs *= np.float32(1.0 / (to - at))
        self._seen = until
        return outputs

    def mean_loss(self) -> float:
        """Return the mean over all samples visited."""
        n = self._seen
        return float((np.log(self._sums[:n], dtype=np.float64) - self._own[:n]).mean())


class Stepwise:
    """Trains softmax regression and one hidden layer by mini-batches without momentum or clipping; `Batched` does the rest.

    Args:
        network: the network that devices train.
        form: form of the first layer: "weights", "kernel", or "auto" for the faster one for each device.
    """

    def __init__(self, network: Softmax | OneHidden, form: str = "auto") -> None:
        self.network = network
        self.form = form
        self._others = Batched(network)
        self._kernels = _Kernels()

    def limits(self, _candidates: int) -> tuple[int, int]:
        """Return the most devices and samples of a block: it holds every device's update."""
        return devices_within(UPDATE_FLOATS, self.network.length, 64), 1 << 20

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
        if local.batch_size == 0 or local.momentum or local.clip or models.device.type != "cpu":
            return self._others.train(models, start, block, orders, local, round_)
        updates = torch.empty(len(start), models.shape[1])
        losses = np.empty(len(start))
        with np.errstate(over="ignore", invalid="ignore"):  # divergence is found by its loss
            for i, n in enumerate(block.lengths.tolist()):
                params = [p.numpy() for p in unflatten(self.network, models[int(start[i])])]
                x, y = block.x[i, :n].numpy(), block.y[i, :n].numpy()
                parts, losses[i] = self._device(
                    int(block.ids[i]), x, y, params, orders[i], local, step_size(local, round_)
                )
                torch.cat([torch.from_numpy(np.ascontiguousarray(p)).view(-1) for p in parts], out=updates[i])
        return Rows(updates, check_losses(losses))

    def _device(
        self,
        place: int,
        x: Array,
        y: NDArray[np.int64],
        params: list[Array],
        order: Shuffler,
        local: LocalSettings,
        lr: float,
    ) -> tuple[list[Array], float]:
        """Return how far each parameter of one device has moved, and the mean loss over the samples it visited."""
        n, size, shrink = len(x), min(local.batch_size, len(x)), lr * local.prox_mu
        steps = local.epochs * -(-n // size) if local.epochs else local.steps
        weight, bias, *tail = params
        first: _Weights | _Dual
        if self.form == "kernel" or (self.form == "auto" and n <= KERNEL_RATIO * x.shape[1]):
            first = _Dual(x=x, kernel=self._kernels.of(place, x), weight=weight, bias=bias, lr=lr, shrink=shrink)
        else:
            first = _Weights(x, weight, bias, lr, shrink)
        output = _Output(y, size, self.network.classes, -(-steps // -(-n // size)))
        behind = _Hidden(tail, lr, shrink) if tail else None
        while steps > 0:
            rows = order.permutation(n)
            first.begin(rows)
            output.begin(rows)
            for at in range(0, min(n, steps * size), size):
                to = min(at + size, n)
                pre = first.forward(at, to)
                errors = output.errors(at, to, pre) if behind is None else behind.errors(at, to, pre, output)
                first.step(at, to, errors)
                steps -= 1
        return [*first.changes(), *(behind.changes() if behind else ())], output.mean_loss()


class _Hidden:
    """ReLU and the second layer."""

    def __init__(self, tail: list[Array], lr: float, shrink: float) -> None:
        self._start = tail
        self._weight, self._bias = tail[0].copy(), tail[1].copy()
        self._lr, self._shrink = np.float32(lr), np.float32(shrink)

    def errors(self, at: int, to: int, pre: Array, output: _Output) -> Array:
        """Return the first layer's errors (b, hidden) for its outputs ``pre``, and take this layer's step."""
        hidden = np.maximum(pre, np.float32(0.0))
        outputs: Array = np.dot(hidden, self._weight.T)
        outputs += self._bias
        top = output.errors(at, to, outputs)
        # Before this layer's step: the error goes back through the weights that caused it.
        below: Array = np.dot(top, self._weight)
        below *= hidden > 0
        if self._shrink:
            self._weight -= self._shrink * (self._weight - self._start[0])
            self._bias -= self._shrink * (self._bias - self._start[1])
        top = top * self._lr
        self._weight -= np.dot(top.T, hidden)
        self._bias -= np.add.reduce(top, 0)
        return below

    def changes(self) -> tuple[Array, Array]:
        """Return how far W2 (classes, hidden) and b2 (classes,) have moved."""
        return self._weight - self._start[0], self._bias - self._start[1]
