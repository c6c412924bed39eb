"""Models as `simulate` takes them: a module, a function that returns one or a task's file, as network and origins."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from shoal.errors import TaskError, UsageError
from shoal.owner.task_compiler.builtin import build, cross_entropy, squared_error, user_factory
from shoal.owner.task_compiler.compile import layout
from shoal.owner.task_compiler.flat import flatten
from shoal.owner.task_compiler.layers import refuse_random, refuse_stateful
from shoal.owner.task_compiler.origin import draw_origins
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.engine.private import PrivateStart
from shoal.simulation.trainers.modules import Loss, ModuleNetwork
from shoal.simulation.trainers.networks import Cnn, Kind, Linear, Network, OneHidden, Softmax
from shoal.task.manifest import KINDS, PRIVATE

Model = nn.Module | Callable[[], nn.Module] | str | Sequence[nn.Module]
TOLERANCE = 1e-4
"""Outputs of a module and of the simulator's own network for it differ at most this much, relative or absolute."""


class InUnits(nn.Module):
    """A model of targets less a centre, divided by a unit, that predicts in the data's unit.

    Args:
        inner: the model that was trained.
        centre: of the targets; unit: theirs.
    """

    def __init__(self, inner: nn.Module, centre: float, unit: float) -> None:
        super().__init__()
        self.inner, self.centre, self.unit = inner, centre, unit

    def forward(self, x: Tensor) -> Tensor:
        """Return the predictions (n, ...) for samples (n, ...)."""
        outputs: Tensor = self.inner(x)
        return outputs * self.unit + self.centre


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model to train.

    Attributes:
        template: a module of the right architecture.
        make: returns a fresh module with initial values; None where there is one instance alone.
        kind: of task.
        local: default local training.
        loss: (outputs, y) -> mean over samples; None for the kind's own.
        earlier: the models of an earlier run that a run begins with; none to begin with ``template`` or new ones.
    """

    template: nn.Module
    make: Callable[[], nn.Module] | None
    kind: Kind
    local: LocalTraining
    loss: Loss | None = None
    earlier: tuple[nn.Module, ...] = ()

    @property
    def integer_inputs(self) -> bool:
        """Whether x holds indices of embeddings."""
        return any(isinstance(m, nn.Embedding | nn.EmbeddingBag) for m in self.template.modules())

    def origins(self, count: int, seed: int) -> NDArray[np.float32]:
        """Return ``count`` starting models, (count, d), float32.

        One origin of an instance is the instance's own values. Several must differ, so the layers draw them again.

        Raises:
            UsageError: several are needed of an instance with a layer that can't draw its values again.
        """
        if self.earlier:
            return np.stack([flatten(model, layout(model)).numpy() for model in self.earlier])
        if self.make is not None:
            make = self.make
        elif count == 1:
            return flatten(self.template, layout(self.template)).numpy()[None].copy()
        else:
            make = self._redrawn
        return draw_origins(make, count, seed)

    def private_start(self, prefixes: Sequence[str]) -> PrivateStart | None:
        """Return the coordinates of the parameters whose names begin with one of ``prefixes``; None without any.

        Raises:
            TaskError: a prefix matches nothing, or all parameters are private.
        """
        if not prefixes:
            return None
        names = {p.name for p in layout(self.template, private=prefixes) if p.segment == PRIVATE}
        parameters = layout(self.template)
        own = np.concatenate([np.full(p.length, p.name in names) for p in parameters])
        return PrivateStart(np.flatnonzero(own), flatten(self.template, parameters).numpy()[own])

    def _redrawn(self) -> nn.Module:
        fresh = copy.deepcopy(self.template)
        for name, layer in fresh.named_modules():
            reset = getattr(layer, "reset_parameters", None)
            if callable(reset):
                reset()
            elif next(layer.parameters(recurse=False), None) is not None:
                raise UsageError(
                    f"this strategy starts from several models, and layer {name or 'model'!r} "
                    f"({type(layer).__name__}) has no reset_parameters to draw another",
                    hint="give a function that returns a new model instead of a model",
                )
        return fresh


def source_of(model: Model, task: str, seed: int) -> ModelSource:
    """Return a model as given to `simulate`.

    Args:
        model: an ``nn.Module``, a function that returns one, or as the task compiler takes it ``file.py:function`` or a name.
        task: a name of `KINDS`; a file names its own instead.
        seed: of torch's generator while a function makes the template; torch's own state is restored.

    Raises:
        UsageError: it is none of these, or there is no such task.
        TaskError: the file can't be used, or the model holds layers that training on devices can't have.
    """
    if task not in KINDS:
        raise UsageError(f"no task {task!r}", hint=f"there are {', '.join(KINDS)}")
    kind: Kind = next(k for k in KINDS if k == task)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed % (1 << 32))
        if isinstance(model, nn.Module):
            source = ModelSource(_in_task_units(model), None, kind, LocalTraining())
        elif isinstance(model, Sequence) and not isinstance(model, str) and model:
            earlier = tuple(_in_task_units(each) for each in model)
            if len({str(layout(each)) for each in earlier}) > 1:
                raise UsageError(
                    "models to begin with have different layers", hint="give those of one run: Result.models"
                )
            source = ModelSource(earlier[0], None, kind, LocalTraining(), earlier=earlier if earlier[1:] else ())
        elif isinstance(model, str):
            factory = user_factory(model) if ":" in model else partial(build, model)
            made = factory()
            loss = None if made.loss in (cross_entropy, squared_error) else made.loss
            source = ModelSource(made.model, lambda: factory().model, made.kind, made.hyper, loss)
        elif callable(model):
            source = ModelSource(_made(model), lambda: _made(model), kind, LocalTraining())
        else:
            raise UsageError(
                f"model is a {type(model).__name__}",
                hint="give an nn.Module or several, a function that returns one, 'file.py:function', or the name of a task",
            )
    refuse_stateful(source.template)
    return source


def network_of(source: ModelSource, x: NDArray[Any], y: NDArray[Any]) -> Network:
    """Return the network that trains the model: one of the simulator's vectorised ones if the model is the same function.

    Args:
        source: the model.
        x: some samples (n, ...), float32 or int64.
        y: their labels (n, ...), int64 or float32.

    Raises:
        TaskError: the model fails on ``x``, draws random numbers, or its outputs do not fit ``y``.
    """
    inputs = torch.from_numpy(np.array(x))
    parameters = layout(source.template)
    general = ModuleNetwork(source.template, parameters, source.kind, y.shape[1:], source.loss)
    outputs = _outputs(source, inputs, y)
    refuse_random(source.template, inputs)
    known = None if source.loss is not None else _known(source.template, source.kind, x.shape[1:], y.shape[1:])
    if known is None or known.shapes != general.shapes:
        return general
    params = [p.detach() for p in source.template.parameters()]
    with torch.no_grad():
        own = known.forward(params, inputs.flatten(1))
    return known if torch.allclose(own, outputs.reshape(own.shape), rtol=TOLERANCE, atol=TOLERANCE) else general


def classes_of(source: ModelSource, x: NDArray[Any]) -> int:
    """Return the number of classes of the model's outputs; ``x`` is at least one sample that `network_of` accepted."""
    with torch.no_grad():
        return int(source.template(torch.from_numpy(np.array(x))).shape[-1])


def _outputs(source: ModelSource, x: Tensor, y: NDArray[Any]) -> Tensor:
    sample = f"samples of shape {tuple(x.shape[1:])}"
    with torch.no_grad():
        try:
            outputs = source.template(x)
        except Exception as error:  # any failure of the caller's own forward
            raise TaskError(f"the model fails on {sample}: {str(error)[:300]}") from error
    if not isinstance(outputs, Tensor) or not outputs.ndim or len(outputs) != len(x):
        raise TaskError("the model must return one tensor whose first dimension is the batch")
    found = tuple(outputs.shape[1:])
    if source.kind == "regression":
        if found not in (y.shape[1:], (*y.shape[1:], 1)):
            raise TaskError(f"the model returns {found} for {sample}, and a target has shape {y.shape[1:]}")
    elif found[:-1] != y.shape[1:] or len(found) != y.ndim or found[-1] < 2:
        raise TaskError(
            f"the model returns {found} for {sample}; a {source.kind} needs {(*y.shape[1:], 'classes')}, at least two",
            hint="for targets that are numbers give task='regression'",
        )
    return outputs


def _known(model: nn.Module, kind: Kind, x_shape: tuple[int, ...], y_shape: tuple[int, ...]) -> Network | None:
    """Return the vectorised network with the model's layers, if there is one; its function is still to be compared."""
    layers = _layers(model)
    convolutions = [m for m in layers if type(m) is nn.Conv2d]
    if layers and type(layers[0]) is nn.Flatten:
        layers = layers[1:]
    dense = [m for m in layers if type(m) is nn.Linear]
    kinds = [type(m) for m in layers]
    if kind == "regression" and kinds == [nn.Linear] and dense[0].out_features == 1 and not y_shape:
        return Linear(dense[0].in_features, bias=dense[0].bias is not None)
    if kind != "classification" or any(m.bias is None for m in (*dense, *convolutions)):
        return None
    if kinds == [nn.Linear]:
        return Softmax(dense[0].in_features, dense[0].out_features)
    if kinds == [nn.Linear, nn.ReLU, nn.Linear]:
        return OneHidden(dense[0].in_features, dense[0].out_features, dense[1].out_features)
    expected = [nn.Conv2d, nn.ReLU, nn.MaxPool2d] * len(convolutions)
    expected += [nn.Flatten, *[nn.Linear, nn.ReLU] * len(dense)][:-1]
    square = len(x_shape) == 3 and x_shape[1] == x_shape[2]
    if not convolutions or not dense or kinds != expected or not square:
        return None
    filters, units = tuple(m.out_channels for m in convolutions), tuple(m.out_features for m in dense)
    kernel, same = convolutions[0].kernel_size[0], convolutions[0].padding != (0, 0)
    try:
        network = Cnn(
            channels=x_shape[0],
            side=x_shape[1],
            classes=units[-1],
            filters=filters,
            dense=units[:-1],
            kernel=kernel,
            same=same,
        )
        return network if network.flat else None
    except TaskError:  # the model's paddings differ, so these layers would leave nothing
        return None


def _layers(model: nn.Module) -> Sequence[nn.Module]:
    if type(model) is not nn.Sequential:
        return [model]
    return [layer for child in model for layer in _layers(child) if type(layer) is not nn.Identity]


def _in_task_units(model: nn.Module) -> nn.Module:
    if not isinstance(model, nn.Module):
        raise UsageError(f"one of the models is a {type(model).__name__}", hint="give the modules of Result.models")
    return copy.deepcopy(model.inner if isinstance(model, InUnits) else model)


def _made(model: Callable[[], nn.Module]) -> nn.Module:
    made = model()
    if not isinstance(made, nn.Module):
        raise UsageError(f"the model's function returned a {type(made).__name__}", hint="it must return an nn.Module")
    return made
