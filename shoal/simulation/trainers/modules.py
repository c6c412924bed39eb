"""Any torch module as a network, by torch's autograd."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional
from torch.nn.utils import vector_to_parameters

from shoal.simulation.trainers.networks import (
    Bound,
    Kind,
    Network,
    gradients,
    images_last,
    sample_losses,
)
from shoal.task.manifest import Parameter

SHORT: Final = 32
"""Positions up to which torch's fused attention takes longer than products and a softmax."""
Loss = Callable[[Tensor, Tensor], Tensor]


class ModuleNetwork(Network):
    """A module as a function of its parameters.

    Args:
        template: the module; its own parameter values are the initial ones.
        layout: its parameters, in the order of theta.
        kind: of task.
        label_shape: shape of one label; regression outputs are reshaped to it, so that ``nn.Linear(n, 1)`` fits y (n,).
        loss: (outputs, y) -> mean over samples, as a task has it; None takes the kind's loss.
    """

    def __init__(
        self,
        template: nn.Module,
        layout: Sequence[Parameter],
        kind: Kind,
        label_shape: tuple[int, ...] = (),
        loss: Loss | None = None,
    ) -> None:
        self._template, self._kind, self._label_shape, self._loss = template, kind, label_shape, loss
        self._names = tuple(p.name for p in layout)
        self._shapes = tuple(p.shape for p in layout)

    @property
    def kind(self) -> Kind:
        """The kind of task."""
        return self._kind

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the parameters."""
        return self._shapes

    def module(self) -> nn.Module:
        """Return the template itself."""
        return self._template

    def forward(self, params: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return outputs (n, ...)."""
        values = {n: p.reshape(s) for n, p, s in zip(self._names, params, self._shapes, strict=True)}
        return self._shaped(functional_call(self._template, values, (images_last(x),)))

    def _shaped(self, outputs: Tensor) -> Tensor:
        return outputs.reshape(len(outputs), *self._label_shape) if self._kind == "regression" else outputs

    @contextmanager
    def bound(self, theta: Tensor) -> Iterator[Bound]:
        """Give the module's own parameters, which share memory with theta (d,) meanwhile, and their gradients."""
        named = dict(self._template.named_parameters())
        params: list[Tensor] = [named[name] for name in self._names]
        kept = [p.data for p in params]
        vector_to_parameters(theta, params)
        layers = [m for m in self._template.modules() if type(m) is nn.MultiheadAttention and packed(m)]
        for layer in layers:
            layer.forward = functools.partial(attend, layer)  # type: ignore[method-assign]
        try:
            yield (
                params,
                functools.partial(
                    gradients, params, lambda x: self._shaped(self._template(images_last(x))), self.mean_loss
                ),
            )
        finally:
            for p, values in zip(params, kept, strict=True):
                p.data = values
            for layer in layers:
                del layer.forward

    def mean_loss(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Return the mean of all samples' losses, ()."""
        return super().mean_loss(outputs, y) if self._loss is None else self._loss(outputs, y)

    def losses(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return each sample's loss (n,) and right labels (n,)."""
        if self._loss is None and self._kind == "regression":
            return ((outputs - y) ** 2).flatten(1).mean(1) if y.dim() > 1 else (outputs - y) ** 2, _zeros(y)
        if self._loss is None:
            return sample_losses(self._kind, outputs, y)
        mean = self._loss
        losses = vmap(lambda o, t: mean(o.unsqueeze(0), t.unsqueeze(0)))(outputs, y)
        return losses, _zeros(y) if self._kind == "regression" else sample_losses(self._kind, outputs, y)[1]


def packed(layer: nn.MultiheadAttention) -> bool:
    """Return whether `attend` can compute the layer where it attends to its own inputs."""
    return layer.in_proj_weight is not None and layer.batch_first and layer.bias_k is None and not layer.add_zero_attn


def attend(layer: nn.MultiheadAttention, x: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
    """Return what a `packed` layer returns; attention of x (n, t, w) to itself in fewer passes than the layer's own forward."""
    masks = [options.get(name) for name in ("attn_mask", "key_padding_mask")] + [options.get("is_causal") or None]
    if rest or options.get("need_weights", True) or masks != [None] * 3 or layer.dropout or not x is key is value:
        return nn.MultiheadAttention.forward(layer, x, key, value, *rest, **options)
    n, t, w = x.shape
    joined = functional.linear(x, layer.in_proj_weight, layer.in_proj_bias)
    parts = joined.view(n, t, 3, layer.num_heads, -1).permute(2, 0, 3, 1, 4)
    if t <= SHORT:
        q, k, v = parts.flatten(1, 2).unbind()
        # A product times a number in one pass: with beta 0 what it is added to is not read.
        scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=layer.head_dim**-0.5)
        found = (torch.softmax(scores, -1) @ v).view(n, layer.num_heads, t, -1)
    else:
        q, k, v = parts.unbind()  # without a copy: the fused attention reads them as they are
        found = functional.scaled_dot_product_attention(q, k, v)
    return layer.out_proj(found.transpose(1, 2).reshape(n, t, w)), None


def _zeros(y: Tensor) -> Tensor:
    return torch.zeros(len(y), dtype=torch.int64, device=y.device)
