"""Any torch module as a network, by torch's autograd."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from shoal.simulation.trainers.networks import Kind, NetworkBase, sample_losses
from shoal.task.manifest import Parameter

Loss = Callable[[Tensor, Tensor], Tensor]


class ModuleNetwork(NetworkBase):
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
        outputs: Tensor = functional_call(self._template, values, (x,))
        return outputs.reshape(len(x), *self._label_shape) if self._kind == "regression" else outputs

    def losses(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """Return each sample's loss (n,) and right labels (n,)."""
        if self._loss is None and self._kind == "regression":
            return ((outputs - y) ** 2).flatten(1).mean(1) if y.dim() > 1 else (outputs - y) ** 2, _zeros(y)
        if self._loss is None:
            return sample_losses(self._kind, outputs, y)
        mean = self._loss
        losses = vmap(lambda o, t: mean(o.unsqueeze(0), t.unsqueeze(0)))(outputs, y)
        return losses, _zeros(y) if self._kind == "regression" else sample_losses(self._kind, outputs, y)[1]


def _zeros(y: Tensor) -> Tensor:
    return torch.zeros(len(y), dtype=torch.int64, device=y.device)
