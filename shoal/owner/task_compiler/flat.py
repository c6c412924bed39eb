"""A torch module as a function of one flat vector. A module of its own, since `graphs` takes seconds to import."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from shoal.task.manifest import Parameter

Loss = Callable[[Tensor, Tensor], Tensor]


class FlatModel:
    """A module as a function of one flat vector.

    Args:
        model: the module; its own values are never used.
        loss: (outputs, y) -> mean over samples.
        layout: the parameters in vector order.
        counts: whether ``correct`` is argmax equality (class labels) or 0.
        target: centre and unit of the labels that the module is trained on; None takes them as they are.
    """

    def __init__(
        self,
        model: nn.Module,
        loss: Loss,
        layout: Sequence[Parameter],
        *,
        counts: bool,
        target: tuple[float, float] | None = None,
    ) -> None:
        self._model, self._loss, self._counts, self._target = model, loss, counts, target
        self._layout = tuple(layout)

    def outputs(self, theta: Tensor, x: Tensor) -> Tensor:
        """Return the module's outputs at ``theta`` (d,) for x (n, ...)."""
        parts = torch.split(theta, [p.length for p in self._layout])
        values = {p.name: part.view(p.shape) for p, part in zip(self._layout, parts, strict=True)}
        result: Tensor = functional_call(self._model, values, (x,))
        return result

    def everything(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return mean loss (), correct () int64, gradient (d,), outputs (n, ...) in the units of y."""
        labels = y if self._target is None else (y - self._target[0]) / self._target[1]

        def objective(vector: Tensor) -> tuple[Tensor, Tensor]:
            outputs = self.outputs(vector, x)
            return self._loss(outputs, labels), outputs

        gradient, (loss, outputs) = grad_and_value(objective, has_aux=True)(theta)
        if self._target is not None:
            outputs = outputs * self._target[1] + self._target[0]
        correct = (outputs.argmax(-1) == y).sum() if self._counts else torch.zeros((), dtype=torch.int64)
        return loss, correct, gradient, outputs


def flatten(model: nn.Module, layout: Sequence[Parameter]) -> Tensor:
    """Return the module's parameters as one vector (d,), float32, in the layout's order."""
    named = dict(model.named_parameters())
    return torch.cat([named[p.name].detach().reshape(-1) for p in layout]).to(torch.float32)
