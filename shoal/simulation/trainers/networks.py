"""The networks that simulated devices train: flat float32 theta in the order of torch's parameters, as on real devices.

A network is a value: sizes, no weights. ``forward`` is a pure function of parameter tensors, so that one definition
serves the plain loop, vectorised training and scoring. Initial weights are torch's default initialisation.
"""

from __future__ import annotations

import functools
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import TaskError
from shoal.owner.task_compiler import builtin
from shoal.types import Float32Vector

Kind = Literal["regression", "classification", "sequence"]
IMAGES: Final = 4
"""Dimensions of a batch of images."""
Found = tuple[Tensor, tuple[Tensor, ...] | list[Tensor]]
"""A mean loss, and the gradients of the parameters."""
Bound = tuple[list[Tensor], Callable[[Tensor, Tensor], Found]]


class Network(ABC):
    """What trainers know of a network, based on its shapes and its torch module."""

    __slots__ = ()

    @property
    def kind(self) -> Kind:
        """Classification, unless a network says otherwise."""
        return "classification"

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parameters in the order in which theta holds them."""
        return _shapes_of(self)

    @abstractmethod
    def module(self) -> nn.Module:
        """Return the network as a torch module, initialised from torch's global generator."""

    @abstractmethod
    def forward(self, params: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return outputs (n, ...) of the network with ``params`` for x (n, *input shape)."""

    @property
    def length(self) -> int:
        """Coordinates d of theta."""
        return sum(math.prod(shape) for shape in self.shapes)

    def init(self, seed: int) -> Float32Vector:
        """Return theta (d,), float32, as torch initialises the module under ``seed``; torch's global generator is restored."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            theta = torch.cat([p.detach().reshape(-1) for p in self.module().parameters()])
        return theta.numpy().astype(np.float32, copy=False)

    def losses(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return each sample's loss (n,) and count of right labels (n,): see `sample_losses`."""
        return sample_losses(self.kind, outputs, y)

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean of all samples' losses, ()."""
        if self.kind == "regression":
            return functional.mse_loss(outputs, y)
        return functional.cross_entropy(outputs.flatten(0, -2), y.flatten())

    @contextmanager
    def bound(self, theta: Tensor) -> Iterator[Bound]:
        """Give the parameters as leaves that share memory with theta (d,), and a function of x and y: mean loss and gradients."""
        params = [p.requires_grad_() for p in unflatten(self, theta.detach())]
        yield params, functools.partial(gradients, params, functools.partial(self.forward, params), self.mean_loss)


@dataclass(frozen=True, slots=True)
class Linear(Network):
    """One linear output, squared error: x (n, inputs), y (n,) float32; W (1, inputs), and b (1,) if there is one."""

    inputs: int
    bias: bool = False

    @property
    def kind(self) -> Kind:
        """Regression."""
        return "regression"

    def module(self) -> nn.Module:
        """Return the torch module."""
        return builtin.linear(self.inputs, bias=self.bias).model

    def forward(self, params: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return outputs (n,)."""
        return functional.linear(x, params[0], params[1] if self.bias else None).squeeze(-1)


@dataclass(frozen=True, slots=True)
class Softmax(Network):
    """Multinomial logistic regression: x (n, inputs), y (n,) int64; W (classes, inputs), b (classes,)."""

    inputs: int
    classes: int

    def module(self) -> nn.Module:
        """Return the torch module."""
        return builtin.logistic(self.inputs, self.classes).model

    def forward(self, params: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return logits (n, classes)."""
        return functional.linear(x, params[0], params[1])


@dataclass(frozen=True, slots=True)
class OneHidden(Network):
    """One hidden layer of ReLU: x (n, inputs), y (n,) int64."""

    inputs: int
    hidden: int
    classes: int

    def module(self) -> nn.Module:
        """Return the torch module."""
        return builtin.mlp(self.inputs, self.hidden, self.classes).model

    def forward(self, params: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return logits (n, classes)."""
        return functional.linear(functional.linear(x, params[0], params[1]).relu_(), params[2], params[3])


@dataclass(frozen=True, slots=True)
class Cnn(Network):
    """Convolutions, each with ReLU and 2x2 max-pooling, then fully connected layers: x (n, channels, side, side) or (n, pixels).

    The default is the network of CFL's public code: 6 and 16 filters of 5x5, then 120 and 84 units.

    Attributes:
        filters: number for each convolution; dense: units of each hidden layer; same: pad so that a convolution preserves
            the side.
    """

    channels: int = 1
    side: int = 28
    classes: int = 10
    filters: tuple[int, ...] = (6, 16)
    dense: tuple[int, ...] = (120, 84)
    kernel: int = 5
    same: bool = False

    @property
    def flat(self) -> int:
        """Number of features after the last pooling."""
        side = self.side
        for _ in self.filters:
            side = (side if self.same else side - self.kernel + 1) // 2
        if side < 1:
            raise TaskError(f"{len(self.filters)} convolutions leave nothing of a side of {self.side}")
        return (self.filters[-1] if self.filters else self.channels) * side * side

    def module(self) -> nn.Module:
        """Return the torch module."""
        layers: list[nn.Module] = [nn.Flatten(), nn.Unflatten(1, (self.channels, self.side, self.side))]
        channels = self.channels
        for count in self.filters:
            padding = self.kernel // 2 if self.same else 0
            layers += [nn.Conv2d(channels, count, self.kernel, padding=padding), nn.ReLU(), nn.MaxPool2d(2)]
            channels = count
        layers.append(nn.Flatten())
        inputs = self.flat
        for units in self.dense:
            layers += [nn.Linear(inputs, units), nn.ReLU()]
            inputs = units
        return nn.Sequential(*layers, nn.Linear(inputs, self.classes))

    def forward(self, params: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return logits (n, classes)."""
        at, padding = 0, self.kernel // 2 if self.same else 0
        x = images_last(x.reshape(-1, self.channels, self.side, self.side))
        for _ in self.filters:
            # After the pooling ReLU has a quarter of the pixels, and the same values as before it.
            x = functional.max_pool2d(functional.conv2d(x, params[at], params[at + 1], padding=padding), 2).relu_()
            at += 2
        x = x.flatten(1)
        for _ in self.dense:
            x = functional.linear(x, params[at], params[at + 1]).relu()
            at += 2
        return functional.linear(x, params[at], params[at + 1])


@dataclass(frozen=True, slots=True)
class Lstm(Network):
    """Next symbol at each position: x (n, length) int64, y (n, length) int64."""

    vocabulary: int
    embedding: int = 128
    hidden: int = 128
    layers: int = 2

    @property
    def kind(self) -> Kind:
        """Sequence."""
        return "sequence"

    def module(self) -> nn.Module:
        """Return the torch module."""
        return builtin.Sequence(self.vocabulary, self.embedding, self.hidden, self.layers)

    def forward(self, params: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return logits (n, length, vocabulary)."""
        states = functional.embedding(x, params[0])
        zeros = states.new_zeros(self.layers, len(x), self.hidden)
        states = torch.lstm(states, (zeros, zeros), list(params[1:-2]), True, self.layers, 0.0, True, False, True)[0]
        return functional.linear(states, params[-2], params[-1])


@functools.cache
def _shapes_of(network: Network) -> tuple[tuple[int, ...], ...]:
    with torch.device("meta"):  # neither memory nor random numbers are taken
        return tuple(tuple(p.shape) for p in network.module().parameters())


def gradients(
    params: list[Tensor],
    forward: Callable[[Tensor], Tensor],
    mean_loss: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
) -> Found:
    """Return the mean loss of samples x and labels y, and the gradients of ``params``, by autograd."""
    with torch.enable_grad():
        loss = mean_loss(forward(x), y)
        return loss.detach(), torch.autograd.grad(loss, params)


def images_last(x: Tensor) -> Tensor:
    """Return images (n, c, h, w) with their channels last in memory, where pooling is 20 times as fast, and others as is."""
    # Not `contiguous`, which leaves images of one channel as they are: both orders of memory are the same for them.
    return x if x.dim() != IMAGES else torch.empty_like(x, memory_format=torch.channels_last).copy_(x)


def unflatten(network: Network, theta: Tensor) -> list[Tensor]:
    """Return the parameters as views of theta (..., d): one tensor (..., *shape) each."""
    parts = torch.split(theta, [math.prod(shape) for shape in network.shapes], -1)
    return [
        p.view(*p.shape[:-1], *shape) if len(shape) > 1 else p for p, shape in zip(parts, network.shapes, strict=True)
    ]


def sample_losses(kind: Kind, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return each sample's loss (n,) float32 and right labels (n,) int64; a sequence's loss is the mean over positions.

    Args:
        kind: the network's.
        outputs: from `Network.forward`.
        y: shape (n,) or, for sequences, (n, length).
    """
    if kind == "regression":
        return (outputs - y) ** 2, torch.zeros(len(y), dtype=torch.int64, device=y.device)
    losses = functional.cross_entropy(outputs.flatten(0, -2), y.flatten(), reduction="none").view(y.shape)
    right = outputs.argmax(-1) == y
    if y.dim() > 1:
        return losses.mean(1), right.sum(1)
    return losses, right.long()


def origins(network: Network, count: int, seed: int) -> NDArray[np.float32]:
    """Return ``count`` starting models, shape (count, d), float32; the same for the same seed, network and place."""
    seeds = np.random.SeedSequence(seed).generate_state(count, np.uint32)
    return np.stack([network.init(int(s)) for s in seeds])


def tensor(values: NDArray[Any], device: str | torch.device = "cpu") -> Tensor:
    """Return ``values`` as a tensor on ``device``, sharing memory on the CPU."""
    if not values.flags.writeable:
        values = values.copy()
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)
