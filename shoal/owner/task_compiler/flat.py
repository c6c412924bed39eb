"""A torch module as a function of one flat vector. A module of its own, since `graphs` takes seconds to import."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value

from shoal.task.manifest import Parameter

Loss = Callable[[Tensor, Tensor], Tensor]


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
        """Return the module's outputs at ``theta`` (d,) float32 for x (n, ...)."""
        parts = torch.split(theta, [p.length for p in self._layout])
        values = {p.name: part.view(p.shape) for p, part in zip(self._layout, parts, strict=True)}
        return _called(self._model, values, x)

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


def _called(module: nn.Module, values: Mapping[str, Tensor], x: Tensor) -> Tensor:
    """Return the module's result with ``values`` for its parameters.

    A parameter that is in several places has its value in each of them, and the module has its own afterwards: torch's own way
    with shared tensors leaves a module that is used twice without its parameter.
    """
    found = {id(p): values[name] for name, p in module.named_parameters() if name in values}
    taken = {
        name: found[id(parameter)]
        for prefix, each in module.named_modules()
        for name, parameter in each.named_parameters(prefix, recurse=False, remove_duplicate=False)
        if id(parameter) in found
    }
    result: Tensor = functional_call(module, taken, (x,), tie_weights=False)
    for each in module.modules():
        if isinstance(each, nn.RNNBase):
            each._init_flat_weights()  # they have a list of their parameters, renewed only by the next call
    return result


def flatten(model: nn.Module, layout: Sequence[Parameter]) -> Tensor:
    """Return the module's parameters as one vector (d,), float32, in the layout's order."""
    named = dict(model.named_parameters())
    return torch.cat([named[p.name].detach().reshape(-1) for p in layout]).to(torch.float32)
