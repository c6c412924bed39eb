"""Built-in tasks, and the loader of a user's task from a Python file."""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import TaskError
from shoal.protocol.recipe import LocalTraining
from shoal.task.data_declaration import DataDeclaration
from shoal.task.manifest import KINDS, Kind
from shoal.util.extensions import TASKS_GROUP, extension_names, load_extension

Loss = Callable[[Tensor, Tensor], Tensor]
Example = Callable[[int], tuple[Tensor, Tensor]]


class TaskSource(NamedTuple):
    """Input of the compiler: a module, its loss, an example batch, the kind of labels and the default training recipe."""

    model: nn.Module
    loss: Loss
    example: Example
    kind: Kind
    hyper: LocalTraining


def cross_entropy(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean negative log-likelihood over all labels.

    Args:
        outputs: shape (n, ..., classes), float32 logits.
        y: shape (n, ...), int64.
    """
    return -functional.log_softmax(outputs, -1).gather(-1, y.unsqueeze(-1)).mean()


def squared_error(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the mean squared error; outputs and y have one shape, float32."""
    return ((outputs - y) ** 2).mean()


class Linear(nn.Module):
    """One linear output a sample."""

    def __init__(self, inputs: int, *, bias: bool) -> None:
        super().__init__()
        self.fc = nn.Linear(inputs, 1, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Return shape (n,) for x (n, inputs)."""
        outputs: Tensor = self.fc(x).squeeze(-1)
        return outputs


class Sequence(nn.Module):
    """A next-symbol LSTM: embedding, layers of LSTM, a linear readout at each position."""

    def __init__(self, vocabulary: int, embedding: int, hidden: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.readout = nn.Linear(hidden, vocabulary)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits (n, length, vocabulary) for x (n, length), int64."""
        states, _ = self.lstm(self.embedding(x))
        outputs: Tensor = self.readout(states)
        return outputs


def linear(inputs: int = 10, *, bias: bool = False) -> TaskSource:
    """Linear regression with squared error."""

    def example(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, inputs), torch.randn(n)

    return TaskSource(Linear(inputs, bias=bias), squared_error, example, "regression", LocalTraining(lr=0.01))


def logistic(inputs: int = 784, classes: int = 10) -> TaskSource:
    """Multinomial logistic regression."""
    model = nn.Sequential()
    model.add_module("fc", nn.Linear(inputs, classes))
    return TaskSource(model, cross_entropy, _vectors((inputs,), classes), "classification", LocalTraining(lr=0.03))


def mlp(inputs: int = 64, hidden: int = 64, classes: int = 10) -> TaskSource:
    """One hidden layer of ReLU."""
    model = nn.Sequential()
    model.add_module("hidden", nn.Linear(inputs, hidden))
    model.add_module("relu", nn.ReLU())
    model.add_module("readout", nn.Linear(hidden, classes))
    return TaskSource(model, cross_entropy, _vectors((inputs,), classes), "classification", LocalTraining(lr=0.1))


def cnn(
    channels: int = 1,
    side: int = 28,
    filters1: int = 32,
    filters2: int = 64,
    hidden: int = 512,
    classes: int = 10,
    *,
    kernel: int = 5,
) -> TaskSource:
    """Two convolutions, each with ReLU and 2x2 max-pooling, then one hidden layer."""
    if kernel % 2 == 0 or side < 4:
        raise TaskError(f"cnn needs an odd kernel and a side of at least 4, not {kernel} and {side}")
    model = nn.Sequential()
    model.add_module("conv1", nn.Conv2d(channels, filters1, kernel, padding=kernel // 2))
    model.add_module("relu1", nn.ReLU())
    model.add_module("pool1", nn.MaxPool2d(2))
    model.add_module("conv2", nn.Conv2d(filters1, filters2, kernel, padding=kernel // 2))
    model.add_module("relu2", nn.ReLU())
    model.add_module("pool2", nn.MaxPool2d(2))
    model.add_module("flatten", nn.Flatten())
    model.add_module("hidden", nn.Linear(filters2 * (side // 4) ** 2, hidden))
    model.add_module("relu3", nn.ReLU())
    model.add_module("readout", nn.Linear(hidden, classes))
    return TaskSource(
        model, cross_entropy, _vectors((channels, side, side), classes), "classification", LocalTraining(lr=0.05)
    )


def lstm(
    vocabulary: int = 1000, embedding: int = 128, hidden: int = 128, layers: int = 2, length: int = 20
) -> TaskSource:
    """Next symbol at each of ``length`` positions; the length is fixed when compiled."""

    def example(n: int) -> tuple[Tensor, Tensor]:
        return torch.randint(0, vocabulary, (n, length)), torch.randint(0, vocabulary, (n, length))

    model = Sequence(vocabulary, embedding, hidden, layers)
    return TaskSource(model, cross_entropy, example, "sequence", LocalTraining(lr=1.0, clip=5.0))


STORED_MODELS: Final = frozenset({".onnx", ".pt", ".pth", ".keras", ".h5", ".tflite", ".pb", ".safetensors", ".ckpt"})
"""Endings of files that hold a model without its source."""

BUILTIN: Mapping[str, Callable[..., TaskSource]] = {
    "linear": linear,
    "logistic": logistic,
    "mlp": mlp,
    "cnn": cnn,
    "lstm": lstm,
}


def build(name: str, **options: int | bool) -> TaskSource:
    """Return a fresh task by its name: (model, loss, example, kind, hyper).

    Args:
        name: linear, logistic, mlp, cnn or lstm, or that of an installed package's function (`shoal.util.extensions`), which
            returns what `load_user` describes.
        options: sizes, the annotated keyword arguments of the function of that name.

    Raises:
        TaskError: no such task, an unknown option, or a size below 1.
    """
    maker = _maker(name)
    known = [arg for arg in maker.__annotations__ if arg != "return"]
    for option, value in options.items():
        if option not in known:
            raise TaskError(f"task {name!r} has no option {option!r}", hint=f"options: {', '.join(known)}")
        if not isinstance(value, int) or (not isinstance(value, bool) and not 1 <= value <= 1 << 24):
            raise TaskError(f"option {option!r} must be an integer of at least 1, not {value!r}")
    return maker(**options) if name in BUILTIN else _checked(partial(maker, **options), name)


def _maker(name: str) -> Callable[..., Any]:
    maker = BUILTIN.get(name) or load_extension(TASKS_GROUP, name)
    if maker is None and Path(name).suffix in STORED_MODELS:
        raise TaskError(
            f"{name!r} is a stored model, and a task is compiled from source in torch",
            hint="write a function in a file.py that makes the module, loads its weights with load_state_dict, and returns "
            "(model, loss, example, kind); then give file.py:function",
        )
    if maker is None:
        names = (*BUILTIN, *extension_names(TASKS_GROUP))
        raise TaskError(
            f"there is no task {name!r}",
            hint=f"choose one of {', '.join(names)}, or give file.py:function, which makes a torch module and a loss",
        )
    if not inspect.isfunction(maker):
        raise TaskError(f"the task {name!r} of an installed package is no function")
    return cast(Callable[..., Any], maker)


def sizes_of(name: str, data: DataDeclaration) -> dict[str, int]:
    """Return the options of a built-in that a declaration of data implies: as many inputs and classes as it names."""
    known = _maker(name).__annotations__
    found = {"inputs": len(data.features), "classes": len(data.labels)}
    return {option: size for option, size in found.items() if size and option in known}


def load_user(spec: str) -> TaskSource:
    """Execute a user's Python file and return its task; only for files that the owner trusts.

    Args:
        spec: ``path/to/file.py:function``; the function takes nothing and returns (model, loss, example, kind, hyper)
            or a dict of those keys, of which ``hyper`` may be left out.

    Raises:
        TaskError: the file or function is missing, fails, or returns something else.
    """
    return user_factory(spec)()


def user_factory(spec: str) -> Callable[[], TaskSource]:
    """Return a function that makes a new task of ``spec`` at each call; see :func:`load_user`."""
    filename, _, function = spec.rpartition(":")
    path = Path(filename)
    if not function.isidentifier() or path.suffix != ".py":
        raise TaskError(f"{spec!r} does not name a function in a file", hint="write file.py:make_model")
    if not path.is_file():
        raise TaskError(f"{path} does not exist")
    module_spec = importlib.util.spec_from_file_location(f"shoal_user_{path.stem}", path)
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except Exception as error:  # the user's own code may raise anything
        raise TaskError(f"{path} fails when it is loaded: {type(error).__name__}: {str(error)[:300]}") from error
    maker = getattr(module, function, None)
    if not callable(maker):
        raise TaskError(f"{path} has no function {function!r}")

    return partial(_checked, maker, spec)


def _checked(maker: Callable[[], Any], name: str) -> TaskSource:
    """Return the task that a function of the user makes.

    Raises:
        TaskError: the function fails, or returns something else.
    """
    try:
        made = maker()
    except Exception as error:  # the user's own code may raise anything
        raise TaskError(f"{name} fails: {type(error).__name__}: {str(error)[:300]}") from error
    return _source(made, name)


def _source(made: Any, spec: str) -> TaskSource:
    names = TaskSource._fields
    if isinstance(made, Mapping):
        if unknown := sorted(set(map(str, made)) - set(names)):
            raise TaskError(f"{spec} returned an unknown key {unknown[0]!r}", hint=f"keys are {', '.join(names)}")
        if missing := [name for name in names if name not in made and name != "hyper"]:
            raise TaskError(f"{spec} returned no {missing[0]!r}")
        made = tuple(made.get(name) for name in names)
    if not isinstance(made, tuple) or len(made) not in (4, 5):
        raise TaskError(f"{spec} must return ({', '.join(names)}) or a dict of them, not {type(made).__name__}")
    model, loss, example, kind, *rest = made
    hyper = (rest[0] if rest else None) or LocalTraining()
    if isinstance(hyper, Mapping):
        known = [f.name for f in dataclasses.fields(LocalTraining)]
        if strange := sorted(set(map(str, hyper)) - set(known)):
            raise TaskError(f"{spec}: hyper has no {strange[0]!r}", hint=f"it has {', '.join(known)}")
        hyper = LocalTraining(**hyper)
    if not isinstance(model, nn.Module) or not callable(loss) or not callable(example):
        raise TaskError(f"{spec} must return an nn.Module, a loss function and an example function")
    if kind not in KINDS or not isinstance(hyper, LocalTraining):
        raise TaskError(f"{spec}: kind must be one of {', '.join(KINDS)}, hyper a LocalTraining or a dict")
    return TaskSource(model, loss, example, kind, hyper)


def _vectors(shape: tuple[int, ...], classes: int) -> Example:
    def example(n: int) -> tuple[Tensor, Tensor]:
        return torch.randn(n, *shape), torch.randint(0, classes, (n,))

    return example
