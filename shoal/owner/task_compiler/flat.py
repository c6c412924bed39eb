"""A torch module as a function of one flat vector. A module of its own, since `graphs` takes seconds to import."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shoal.task.manifest import Parameter

Loss = Callable[[Tensor, Tensor], Tensor]


class _Lowered(TorchFunctionMode):
    """Write linear layers as matrix products: torch folds the batch of more than two axes into a number, and fixes it so."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return _linear(*args, **kwargs) if func is functional.linear else func(*args, **kwargs)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    product = x @ weight.t()
    return product if bias is None else product + bias


class FlatModel:
    """A module as a function of one flat vector.

    Args:
        model: the module; it lends the values of its buffers and frozen parameters, and none of those in ``layout``.
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
        """Return the module's outputs at ``theta`` (d,) for x (n, ...), both float32 or both float64."""
        parts = torch.split(theta, [p.length for p in self._layout])
        values = {p.name: part.view(p.shape) for p, part in zip(self._layout, parts, strict=True)}
        with _Lowered():
            result: Tensor = functional_call(self._model, _constants(self._model, theta.dtype) | values, (x,))
        return result

    def loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the mean loss () of outputs in the unit that the module is trained on."""
        if isinstance(self._loss, nn.Module):
            result: Tensor = functional_call(self._loss, _constants(self._loss, outputs.dtype), (outputs, labels))
            return result
        return self._loss(outputs, labels)

    def everything(self, theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return mean loss (), correct () int64, gradient (d,), outputs (n, ...) in the units of y."""
        labels = y if self._target is None else (y - self._target[0]) / self._target[1]

        def objective(vector: Tensor) -> tuple[Tensor, Tensor]:
            outputs = self.outputs(vector, x)
            return self.loss(outputs, labels), outputs

        gradient, (loss, outputs) = grad_and_value(objective, has_aux=True)(theta)
        if self._target is not None:
            outputs = outputs * self._target[1] + self._target[0]
        correct = (outputs.argmax(-1) == y).sum() if self._counts else torch.zeros((), dtype=torch.int64)
        return loss, correct, gradient, outputs


def _constants(module: nn.Module, dtype: torch.dtype) -> dict[str, Tensor]:
    """Return the floating-point buffers and frozen parameters of a module in ``dtype``, by name."""
    named = [*module.named_buffers(), *((name, p) for name, p in module.named_parameters() if not p.requires_grad)]
    return {name: value.detach().to(dtype) for name, value in named if value.is_floating_point()}


def flatten(model: nn.Module, layout: Sequence[Parameter]) -> Tensor:
    """Return the module's parameters as one vector (d,), float32, in the layout's order."""
    named = dict(model.named_parameters())
    return torch.cat([named[p.name].detach().reshape(-1) for p in layout]).to(torch.float32)
