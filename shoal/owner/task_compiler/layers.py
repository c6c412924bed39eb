"""Find the layer that prevents compilation, and name a replacement."""

from __future__ import annotations

import re
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm, _NormBase
from torch.nn.modules.dropout import _DropoutNd
from torch.utils._python_dispatch import TorchDispatchMode

from shoal.errors import TaskError, text_of

_RANDOM: Final = re.compile(r"rand|bernoulli|dropout|multinomial|normal_functional|uniform|exponential")
_OPERATOR: Final = re.compile(r"aten[.:]+(\w+)")
_ESCAPE_HINT: Final = "replace that layer or function; docs/operator/which-models.md lists what is known to work"

_FORMS: Final = {
    "topk": "take them in an order: x.gather(1, x.argsort(1, descending=True)[:, :k])",
    "sort": "take them in an order: x.gather(1, x.argsort(1))",
    "unfold": "stack slices: torch.stack([x[:, i : i + size] for i in range(0, last, step)], 1)",
    "fft_r2c": "multiply by the matrices of its cosines and sines, as buffers",
}
"""Forms that compile, by operator that does not."""


def refuse_stateful(model: nn.Module) -> None:
    """Raise TaskError for the first layer that depends on other samples of a batch, on earlier batches or on chance."""
    for name, layer in model.named_modules():
        kind = type(layer).__name__
        if isinstance(layer, _BatchNorm) and (layer.training or not layer.track_running_stats):
            raise TaskError(
                f"layer {name!r} ({kind}) normalises by the batch's statistics, which clients with different data can't share",
                hint="use GroupNorm or LayerNorm, or freeze it with .eval()",
            )
        kinds = {kind, *(type(hook).__name__ for hook in layer._forward_pre_hooks.values())}
        if layer.training and kinds & {"SpectralNorm", "_SpectralNorm"}:
            raise TaskError(
                f"layer {name!r} is under spectral_norm, which changes vectors of its own in every forward pass",
                hint="freeze them: call .eval() on the layer; its weight is trained all the same",
            )
        if isinstance(layer, _NormBase) and layer.training and layer.track_running_stats:
            raise TaskError(
                f"layer {name!r} ({kind}) tracks statistics while training", hint="set track_running_stats=False"
            )
        rate = layer.p if isinstance(layer, _DropoutNd) else getattr(layer, "dropout", 0.0)
        if isinstance(rate, float) and rate > 0 and layer.training:
            raise TaskError(
                f"layer {name!r} ({kind}) drops activations at random, which a compiled graph can't",
                hint="remove it or call .eval() on it; fewer local epochs or FedProx's mu regularise instead",
            )


def untrained_statistics(model: nn.Module) -> str:
    """Return a note on frozen batch normalisation that still has the statistics from before training; empty without any."""
    named = [
        f"{name!r} ({type(layer).__name__})"
        for name, layer in model.named_modules()
        if isinstance(layer, _BatchNorm) and not layer.training and layer.running_mean is not None
        if not layer.running_mean.any() and layer.running_var is not None and set(layer.running_var.tolist()) == {1.0}
    ]
    if not named:
        return ""
    return (
        f"layer {named[0]}{f' and {len(named) - 1} more' if named[1:] else ''}: frozen with mean 0 and variance 1, the values "
        "before training, so it normalises nothing; load trained weights with their statistics, or use GroupNorm"
    )


def refuse_random(model: nn.Module, x: Tensor) -> None:
    """Raise TaskError if a forward pass draws random numbers: a compiled graph is a function of its inputs alone.

    Args:
        model: the module.
        x: example input, batch first.
    """
    for operator, layer in sorted(_users(model, x)):
        if operator == "pack_padded_sequence":
            raise TaskError(
                f"layer {layer!r} packs sequences by their lengths, which a compiled graph can't",
                hint="give the layer the padded sequences, and take the output at each one's end with gather",
            )
        if _RANDOM.search(operator):
            raise TaskError(
                f"layer {layer!r} draws random numbers ({operator}), perhaps by functional.dropout in its forward",
                hint="remove it, or make it depend on self.training and call .eval()",
            )


def trained(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Return names and values of the parameters that a device trains: those that are not frozen."""
    return [(name, value) for name, value in model.named_parameters() if value.requires_grad]


def embedding_limit(model: nn.Module, x: Tensor) -> int:
    """Return the bound that embedding tables set on x: the fewest rows of those that read x directly; 0 without any."""
    rows: list[int] = []

    def note(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        if isinstance(layer, nn.Embedding) and inputs and inputs[0] is x:
            rows.append(layer.num_embeddings)

    handles = [m.register_forward_pre_hook(note) for m in model.modules() if isinstance(m, nn.Embedding)]
    try:
        with torch.no_grad():
            if handles:
                model(x)
    finally:
        for handle in handles:
            handle.remove()
    return min(rows, default=0)


def blame(model: nn.Module, x: Tensor, error: BaseException) -> TaskError:
    """Return the TaskError for a failure to compile; it names the layers that use the operator in the exporter's message.

    Args:
        model: the module.
        x: example input, batch first.
        error: the exception that torch raised; a TaskError with a hint says all itself.
    """
    text = " ".join(str(part) for part in (error, error.__cause__, error.__context__) if part)
    if "data-dependent" in text:
        return TaskError(
            "forward or the loss decides by the values of its input: an if, a loop, .item() or an index by a mask",
            hint="write the choice for all samples at once: torch.where, or a product with the mask as numbers",
        )
    if "Constraints violated" in text:
        return TaskError(
            "forward or the loss fixes the number of samples, which differs from batch to batch",
            hint="take it as x.shape[0], not as len(x) or a number, and leave it to -1 in a reshape",
        )
    if isinstance(error, TaskError) and error.hint:
        return error
    operators = list(dict.fromkeys(_OPERATOR.findall(text)))
    users = _users(model, x)
    for used, layer in sorted(users):
        if used in _FORMS:
            return TaskError(
                f"layer {layer!r} can't be compiled: ONNX has no form of {used} that can be trained", hint=_FORMS[used]
            )
    if isinstance(error, TaskError):
        return error
    for operator in operators:
        stem = operator.removesuffix("_backward").strip("_")
        layers = sorted({layer for used, layer in users if used == stem})
        if layers:
            named = ", ".join(repr(layer) for layer in layers[:3])
            return TaskError(f"layer {named} can't be compiled: no ONNX form of {operator}", hint=_ESCAPE_HINT)
    reason = f"no ONNX form of {operators[0]}" if operators else text_of(error).splitlines()[0][:300]
    return TaskError(f"the model can't be compiled: {reason}", hint=_ESCAPE_HINT)


def _users(model: nn.Module, x: Tensor) -> set[tuple[str, str]]:
    """Return (operator, innermost layer) for every operator of one forward pass."""
    stack, users = ["model"], set[tuple[str, str]]()

    class Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            users.add((func.overloadpacket.__name__.strip("_"), stack[-1]))
            return func(*args, **(kwargs or {}))

    handles = []
    for name, layer in model.named_modules():
        label = f"{name} ({type(layer).__name__})" if name else "model"
        handles.append(layer.register_forward_pre_hook(lambda _m, _i, label=label: stack.append(label)))
        handles.append(layer.register_forward_hook(lambda _m, _i, _o: stack.pop() and None))
    try:
        with Recorder():  # type: ignore[no-untyped-call]
            model(x)
    finally:
        for handle in handles:
            handle.remove()
    return users
