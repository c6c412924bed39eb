"""Forward and backward of stacks of linear layers for many devices at once, by batched matrix products.

For a layer with inputs B (c, b, in) and output errors A (c, b, out), each already weighted by the sample's share in
its device's mean, the gradient of W is A^T B and that of the bias the sum of A over samples. `Descent` applies the factors at
once, or forms the gradient where momentum or clipping needs it; the dual form stores A alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeGuard

import torch
from torch import Tensor

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.trainers.networks import Linear, Network, OneHidden, Softmax

Dense = Linear | Softmax | OneHidden
Factors = list[tuple[Tensor, Tensor]]


def is_dense(network: Network) -> TypeGuard[Dense]:
    """Return whether this module can train the network."""
    return isinstance(network, Linear | Softmax | OneHidden)


def has_bias(network: Dense) -> bool:
    """Return whether layers have a bias."""
    return not isinstance(network, Linear) or network.bias


def copies(params: list[Tensor], start: Tensor) -> list[Tensor]:
    """Return each device's own copy of its first model.

    Args:
        params: of k models, (k, *shape) each.
        start: shape (c,), int64.
    """
    return [p.index_select(0, start) for p in params]


def first_layer(params: list[Tensor], x: Tensor, *, bias: bool) -> Tensor:
    """Return the first layer's outputs (c, b, out) for x (c, b, in)."""
    weight = params[0].transpose(1, 2)
    return torch.baddbmm(params[1].unsqueeze(1), x, weight) if bias else torch.bmm(x, weight)


def errors(network: Dense, tail: list[Tensor], pre: Tensor, y: Tensor, w: Tensor) -> tuple[Factors, Tensor, Tensor]:
    """Return the factors of the layers after the first, the first layer's errors, and the losses.

    Args:
        network: a dense network.
        tail: each device's own parameters after the first layer, (c, *shape) each.
        pre: the first layer's outputs (c, b, out), not modified.
        y: shape (c, b).
        w: each sample's weight, shape (c, b), float32; 0 for padding.

    Returns:
        Factors (A, B) of W2 if there is one; A of the first layer (c, b, out); losses (c, b), 0 for padding.
    """
    if not isinstance(network, OneHidden):
        top, losses = _output(network, pre, y, w)
        return [], top, losses
    hidden = pre.relu()
    outputs = torch.baddbmm(tail[1].unsqueeze(1), hidden, tail[0].transpose(1, 2))
    top, losses = _output(network, outputs, y, w)
    below = torch.bmm(top, tail[0])
    torch.ops.aten.threshold_backward.grad_input(below, hidden, 0.0, grad_input=below)
    return [(top, hidden)], below, losses


def _output(network: Dense, outputs: Tensor, y: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs' weighted errors (c, b, out) and the losses (c, b)."""
    used = w > 0
    if isinstance(network, Linear):
        residual = outputs.squeeze(2) - y
        return (residual * w).mul_(2.0).unsqueeze(2), residual.square_().mul_(used)
    log_p = torch.log_softmax(outputs, 2)
    index = y.unsqueeze(2)
    losses = log_p.gather(2, index).squeeze(2).neg_().mul_(used)
    top = log_p.exp_()
    top.scatter_add_(2, index, torch.full_like(index, -1.0, dtype=top.dtype))
    return top.mul_(w.unsqueeze(2)), losses


@dataclass(slots=True)
class Descent:
    """Each device's own layers under the recipe of local training: `edge_client.learning.training`, for all devices at once.

    Attributes:
        params: W, b, W, b, ... of c devices, (c, *shape) each; biases only if ``bias``.
        first: copies of where they started; velocity: of the same shapes, empty without momentum.
    """

    params: list[Tensor]
    lr: float
    local: LocalTraining
    bias: bool = True
    first: list[Tensor] = field(default_factory=list)
    velocity: list[Tensor] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first = [p.clone() for p in self.params]
        if self.local.momentum:
            self.velocity = [torch.zeros_like(p) for p in self.params]

    def step(self, layers: Factors, a: int, before: Sequence[Tensor] = ()) -> None:
        """Take one step of the first ``a`` devices.

        Args:
            layers: the factors of the gradients of the last parameters.
            a: number of devices.
            before: the gradients of the parameters before these, (a, *shape) each, which may be overwritten.
        """
        params = [p[:a] for p in self.params]
        if self.local.momentum or self.local.clip:
            self.apply([*before, *self._gradient(layers)], a)
        else:
            self._at_once(params, layers, a, before)

    def _at_once(self, params: list[Tensor], layers: Factors, a: int, before: Sequence[Tensor]) -> None:
        shrink = self.lr * self.local.prox_mu
        stride = 2 if self.bias else 1
        for p, g in zip(params, before, strict=False):
            if shrink:
                p.mul_(1.0 - shrink)
            p.sub_(g, alpha=self.lr)
        last = params[len(before) :]
        for i, (error, inputs) in enumerate(layers):
            last[stride * i].baddbmm_(error.transpose(1, 2), inputs, beta=1.0 - shrink, alpha=-self.lr)
            if self.bias:
                bias = last[2 * i + 1]
                if shrink:
                    bias.mul_(1.0 - shrink)
                bias.sub_(error.sum(1), alpha=self.lr)
        if shrink:
            for p, f in zip(params, self.first, strict=True):
                p.add_(f[:a], alpha=shrink)

    def _gradient(self, layers: Factors) -> list[Tensor]:
        gradient: list[Tensor] = []
        for error, inputs in layers:
            gradient.append(torch.bmm(error.transpose(1, 2), inputs))
            if self.bias:
                gradient.append(error.sum(1))
        return gradient

    def apply(self, gradient: list[Tensor], a: int) -> None:
        """Take one step of the first ``a`` devices along their gradients, (a, *shape) each, which are overwritten."""
        params = [p[:a] for p in self.params]
        if self.local.prox_mu:
            for g, p, f in zip(gradient, params, self.first, strict=True):
                g.add_(p - f[:a], alpha=self.local.prox_mu)
        if self.local.clip:
            norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradient]).norm(dim=0)
            factor = (self.local.clip / norms).clamp_(max=1.0)
            for g in gradient:
                g.mul_(factor.view(-1, *[1] * (g.dim() - 1)))
        if self.local.momentum:
            for g, v in zip(gradient, self.velocity, strict=True):
                v[:a].mul_(self.local.momentum).add_(g)
            gradient = [v[:a] for v in self.velocity]
        for p, g in zip(params, gradient, strict=True):
            p.sub_(g, alpha=self.lr)

    def changes(self) -> list[Tensor]:
        """Return how far the parameters have moved, (c, size) each."""
        return [(p - f).flatten(1) for p, f in zip(self.params, self.first, strict=True)]
