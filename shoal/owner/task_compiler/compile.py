"""Compile a torch module and a loss into a task bundle that a device runs without torch."""

from __future__ import annotations

import contextlib
import io
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter

from shoal.errors import TaskError
from shoal.owner.task_compiler.layers import blame, embedding_limit, refuse_random, refuse_stateful, trained
from shoal.protocol.recipe import LocalTraining
from shoal.task.bundle import TaskBundle
from shoal.task.data_declaration import NO_DECLARATION, DataDeclaration
from shoal.task.manifest import PRIVATE, SEGMENT_ORDER, Kind, Parameter, TaskManifest, TensorSpec
from shoal.util import telemetry

if TYPE_CHECKING:
    from shoal.owner.task_compiler.flat import FlatModel, Loss
    from shoal.owner.task_compiler.selfcheck import Example

_PERTURBATION = 0.01
"""Spread added to the initial parameters for tracing and checks: zero weights would hide a wrong gradient."""

_SEED = 20_260
_TRACE_BATCH = 8
_EMPTY = "0" * 64


def compile_task(
    model: nn.Module,
    loss: Loss,
    example: Example,
    *,
    name: str,
    kind: Kind,
    hyper: LocalTraining | None = None,
    shared: Sequence[str] = (),
    private: Sequence[str] = (),
    data: DataDeclaration = NO_DECLARATION,
) -> TaskBundle:
    """Compile a task and check it against torch; torch's random state, warnings and streams are restored.

    Args:
        model: maps x (n, ...) to outputs (n, classes), (n, positions, classes), or the shape of y for regression. Its own
            values of the private parameters are those that every device begins with.
        loss: (outputs, y) -> scalar, a mean over samples.
        example: n -> (x, y), random samples of the right shapes and dtypes.
        name: the task's name.
        kind: classification, regression or sequence.
        hyper: default local training.
        shared: prefixes of parameter names that all clusters share (IFCA section 4.3); the rest is per cluster.
        private: prefixes of parameter names that stay on each device (FedPer).
        data: names of columns and classes, and the preparation of the samples.

    Raises:
        TaskError: the model can't be compiled (names the layer and a replacement), or its results differ from torch's.
    """
    telemetry.switch_off()  # torch's exporter may import ONNX Runtime by itself
    from shoal.owner.task_compiler.graphs import OPSET

    refuse_stateful(model)
    parameters = layout(model, shared, private)
    hyper = hyper or LocalTraining()
    with torch.random.fork_rng(devices=[]), quiet():
        torch.manual_seed(_SEED)
        x, y = _samples(example, _TRACE_BATCH)
        outputs = _outputs(model, x)
        _check_outputs(outputs, y, kind)
        manifest = TaskManifest(
            name=name,
            opset=OPSET,
            kind=kind,
            parameters=parameters,
            input=TensorSpec(tuple(x.shape[1:]), _dtype(x, "x"), embedding_limit(model, x)),
            label=TensorSpec(tuple(y.shape[1:]), _dtype(y, "y"), 0 if kind == "regression" else int(outputs.shape[-1])),
            hyper=hyper,
            score_digest=_EMPTY,
            grad_digest=_EMPTY,
            predict_digest=_EMPTY,
            data=data,
        )
        _check_loss(loss, outputs, y)
        refuse_random(model, x)
        return _build(model, loss, example, manifest, (x, y))


def layout(model: nn.Module, shared: Sequence[str] = (), private: Sequence[str] = ()) -> tuple[Parameter, ...]:
    """Return the trained parameters in vector order: shared ones first, private ones last, else as the module lists them.

    Frozen ones (``requires_grad=False``) are constants of the graphs, and no coordinates.

    Args:
        model: the module.
        shared: prefixes of whole name parts: ``conv`` covers ``conv.weight``, not ``conv2.weight``.
        private: as ``shared``.

    Raises:
        TaskError: a prefix matches nothing, a parameter is both shared and private, all are private, or one is not
            float32.
    """
    prefixes = {"shared": tuple(shared), PRIVATE: tuple(private)}
    unused = {prefix for each in prefixes.values() for prefix in each}
    found: list[Parameter] = []
    for name, value in trained(model):
        if isinstance(value, UninitializedParameter):
            raise TaskError(
                f"parameter {name!r} has no shape yet", hint="give the layer its size in place of a Lazy layer"
            )
        if value.dtype != torch.float32:
            raise TaskError(f"parameter {name!r} is {value.dtype}", hint="call .float() on the model")
        matches = {
            segment: {prefix for prefix in each if f"{name}.".startswith(f"{prefix.rstrip('.')}.")}
            for segment, each in prefixes.items()
        }
        unused -= {prefix for each in matches.values() for prefix in each}
        if all(matches.values()):
            raise TaskError(
                f"parameter {name!r} is both shared ({min(matches['shared'])!r}) and private ({min(matches[PRIVATE])!r})",
                hint="a parameter is averaged over all clusters or stays on its device: name it in one of the two",
            )
        segment = next((segment for segment, each in matches.items() if each), "cluster")
        found.append(Parameter(name, tuple(value.shape), segment))
    if not found:
        raise TaskError("the model has no parameters to train", hint="give at least one layer requires_grad=True")
    if unused:
        raise TaskError(
            f"no parameter begins with {min(unused)!r}", hint=f"names are: {', '.join(p.name for p in found)[:300]}"
        )
    if all(p.segment == PRIVATE for p in found):
        raise TaskError(
            f"all parameters are private ({', '.join(p.name for p in found)[:300]}): devices would train nothing together",
            hint="name fewer as private, such as the last layer alone; for training alone use the algorithm 'local'",
        )
    return tuple(sorted(found, key=lambda p: SEGMENT_ORDER.index(p.segment)))


def _build(
    model: nn.Module, loss: Loss, example: Example, manifest: TaskManifest, sample: tuple[Tensor, Tensor]
) -> TaskBundle:
    from shoal.owner.task_compiler.flat import FlatModel, flatten
    from shoal.owner.task_compiler.graphs import extract, lower, trace
    from shoal.owner.task_compiler.selfcheck import check

    target = manifest.data.target_scale if manifest.data.target else None
    counts = manifest.kind != "regression"
    flat: FlatModel = FlatModel(model, loss, manifest.parameters, counts=counts, target=target)
    # Zero weights, as some layers start with, would make wrong gradients look right in the comparison below.
    theta = flatten(model, manifest.parameters)
    private = theta[manifest.federated_length :].numpy()
    if not np.isfinite(private).all():
        raise TaskError("the model's initial values of private parameters are not finite")
    theta = theta + _PERTURBATION * torch.randn(theta.shape)
    inputs = (theta, *sample)
    try:
        graph = trace(flat, inputs)
        whole = lower(graph, inputs)
        score, grad, predict = (extract(whole, part) for part in ("score", "grad", "predict"))
        bundle = TaskBundle.seal_digests(manifest, score, grad, predict, private.astype("<f4").tobytes())
        check(bundle, flat, theta, example, max(manifest.hyper.batch_size, 32))
    except Exception as error:  # noqa: BLE001 - torch raises dozens of types here; all mean "can't compile"
        found = blame(model, sample[0], error)
        raise found from (None if found is error else error)
    return bundle


def _dtype(tensor: Tensor, what: str) -> str:
    names = {torch.float32: "float32", torch.int64: "int64"}
    if tensor.dtype not in names:
        raise TaskError(f"example's {what} is {tensor.dtype}", hint="use torch.float32 or torch.int64")
    return names[tensor.dtype]


def _samples(example: Example, n: int) -> tuple[Tensor, Tensor]:
    """Return x and y of n samples; copies, since an example may return one tensor as both, and a graph has each input once."""
    pair = example(n)
    if not (
        isinstance(pair, Sequence)
        and len(pair) == 2
        and all(isinstance(part, Tensor) and part.ndim and len(part) == n for part in pair)
    ):
        raise TaskError(
            "example(n) must return tensors (x, y) whose first dimension is n",
            hint="for a model that reconstructs its input, return x, x; join several inputs to one with torch.cat, and cut "
            "it in forward",
        )
    return pair[0].clone(), pair[1].clone()


def _outputs(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        try:
            outputs = model(x)
        except Exception as error:  # any failure of the user's own forward
            raise TaskError(f"the model fails on its own example: {str(error)[:300]}") from error
    if not isinstance(outputs, Tensor) or outputs.ndim == 0 or len(outputs) != len(x):
        raise TaskError(
            "the model must return one tensor whose first dimension is the batch",
            hint="join several outputs to one tensor with torch.cat, and cut it in the loss",
        )
    return outputs


def _check_outputs(outputs: Tensor, y: Tensor, kind: Kind) -> None:
    expected = tuple(y.shape) if kind == "regression" else (*y.shape, outputs.shape[-1])
    if tuple(outputs.shape) != expected:
        raise TaskError(
            f"a {kind} model with labels {tuple(y.shape[1:])} must return {expected[1:]} a sample, "
            f"not {tuple(outputs.shape[1:])}",
            hint=_shape_hint(outputs, y, kind),
        )
    if kind != "regression" and int(y.max()) >= outputs.shape[-1]:
        raise TaskError(
            f"example draws label {int(y.max())}, the model has {outputs.shape[-1]} classes",
            hint="a model with one output a sample is of kind 'regression', with y as float32 of the outputs' shape"
            if outputs.shape[-1] == 1
            else "labels count from 0",
        )
    if not math.isfinite(float(np.sum(outputs.numpy(), dtype=np.float64))):
        raise TaskError("the model's outputs on its own example are not finite")


def _shape_hint(outputs: Tensor, y: Tensor, kind: Kind) -> str:
    if kind == "regression":
        return "give y the outputs' shape: y.unsqueeze(-1), with .expand(-1, k) for k quantiles; its loss may be any function"
    if outputs.ndim == y.ndim:
        return "several labels a sample, or one output, are of kind 'regression': y as float32 and BCEWithLogitsLoss"
    return "a label for each pixel or step is of kind 'sequence': outputs.flatten(2).transpose(1, 2) and y.flatten(1)"


def _check_loss(loss: Loss, outputs: Tensor, y: Tensor) -> None:
    try:
        value = loss(outputs, y)
    except Exception as error:  # any failure of the user's own loss
        raise TaskError(f"the loss fails on the model's own example: {str(error)[:300]}") from error
    if not isinstance(value, Tensor) or value.ndim:
        found = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
        raise TaskError(
            f"the loss must return one number, the mean over the samples, not {found}", hint="use reduction='mean'"
        )


_LOGGERS = ("torch", "onnxscript", "onnx_ir", "torch.onnx", "torch.export")


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silence stdout, stderr, warnings and the exporter's loggers inside the block, and restore them afterwards."""
    levels = [(logging.getLogger(name), logging.getLogger(name).level) for name in _LOGGERS]
    sink = io.StringIO()
    try:
        for logger, _ in levels:
            logger.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(), contextlib.redirect_stdout(sink), contextlib.redirect_stderr(sink):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in levels:
            logger.setLevel(level)
