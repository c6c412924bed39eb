"""Compare a compiled bundle with torch before it is signed, and ONNX Runtime with numpy if numpy has its operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from edge_client.learning.model import Backend, NumpyModel, OrtModel
from shoal.errors import TaskError
from shoal.owner.task_compiler.flat import FlatModel
from shoal.task.bundle import TaskBundle
from shoal.types import Float32Vector

TOLERANCE: Final = 1e-5
"""Largest relative L2 distance to torch's gradient; float32 round-off reaches about 2e-6."""

EXECUTOR_TOLERANCE: Final = 1e-5
"""Largest relative L2 distance of numpy's gradient and outputs to ONNX Runtime's, and of the losses; round-off reaches 2e-6."""

MEAN_TOLERANCE: Final = 1e-4
"""Largest difference of a batch's loss to the mean of its parts' losses, relative if the loss is above 1."""

PARTIAL_BATCH: Final = 7
_DRAWS: Final = 8
"""Most draws at one batch size. A draw with an input within round-off of the kink of a ReLU or a pool says nothing."""

_AGREEMENTS: Final = 2
"""Draws that have to agree at a batch size, and fewer have to differ: a kink may show in one executor alone."""

_NEAR: Final = 1e-6
"""Relative distance of the parameters next to theta: what several roundings of float32 amount to."""

_NEIGHBOURS: Final = 4

Example = Callable[[int], tuple[Tensor, Tensor]]
Compare = Callable[[Tensor, Tensor], str | None]
"""Compares two computations on samples x, y: a description of the first difference, an empty string, or None at a kink."""
_FIXED_HINT: Final = (
    "often forward or the loss fixes the number of samples: divide by y.shape[0], not len(y), or by reduction='mean'"
)


def check(bundle: TaskBundle, flat: FlatModel, theta: Tensor, example: Example, full_batch: int) -> None:
    """Compare gradients, losses, counts and outputs with torch at batch sizes 1, PARTIAL_BATCH and ``full_batch``.

    Args:
        bundle: the compiled task.
        flat: the same task in torch.
        theta: shape (d,), float32, the parameters at which to compare.
        example: draws n samples.
        full_batch: the largest batch to try.

    Raises:
        TaskError: a result differs, with the layer whose gradient is worst; the loss is not a mean over samples; or numpy has
            the task's operators and computes something else than ONNX Runtime.
    """
    model = OrtModel(bundle)
    compare_torch = partial(_compare, model, bundle, flat, theta)
    _require("compiled task is not the torch model", compare_torch, example, full_batch, _FIXED_HINT)
    light = lite_model(bundle)
    if isinstance(light, NumpyModel):
        compare = partial(_compare_executors, model, light, theta.numpy())
        _require("numpy does not compute the task as ONNX Runtime does", compare, example, full_batch)
    _check_mean(model, theta.numpy(), *example(2 * PARTIAL_BATCH + 1))


def lite_model(bundle: TaskBundle) -> NumpyModel | TaskError:
    """Return the task in numpy, with which devices without ONNX Runtime train it; or the reason why they can't."""
    try:
        return NumpyModel(bundle)
    except TaskError as error:
        return error


def lite_words(bundle: TaskBundle) -> str:
    """Return a line about the devices that can train a task that `check` accepted."""
    light = lite_model(bundle)
    if isinstance(light, TaskError):
        return f"devices need ONNX Runtime (the extra edge): {light}"
    return "devices train it with ONNX Runtime (the extra edge) or numpy alone (edge-lite)"


def _require(what: str, compare: Compare, example: Example, full_batch: int, hint: str = "") -> None:
    """Compare at every batch size. A large batch of a deep model may have a kink in each draw, a single sample may not.

    Raises:
        TaskError: as many draws differ as agree, or all draws of a single sample are at kinks.
    """
    for size in sorted({1, PARTIAL_BATCH, full_batch}):
        agreed, differences = 0, list[str]()
        for _ in range(_DRAWS):
            difference = compare(*example(size))
            if difference:
                differences.append(difference)
            elif difference is not None:
                agreed += 1
            if _AGREEMENTS in (agreed, len(differences)):
                break
        if len(differences) >= max(agreed, 1):
            raise TaskError(f"{what}, batch of {size}: {differences[-1]}", hint=hint)
        if not agreed and size == 1:
            raise TaskError(
                f"{what}: torch's own gradient has no stable value", hint="look for a division or a root near zero"
            )


def _compare_executors(model: Backend, light: Backend, theta: Float32Vector, x: Tensor, y: Tensor) -> str:
    """Return a description of the first difference between two executors, or an empty string."""
    samples, labels = x.numpy(), y.numpy()
    (loss, gradient), (other_loss, other) = (each.grad(theta, samples, labels) for each in (model, light))
    distance = _relative(other, gradient)
    # Negated, so that NaN counts as a difference.
    if not distance <= EXECUTOR_TOLERANCE:
        return f"gradient differs by {distance:.1e} (at most {EXECUTOR_TOLERANCE:.0e})"
    score, other_score = (each.score(theta, samples, labels) for each in (model, light))
    for a, b in ((loss, other_loss), (score.mean_loss, other_score.mean_loss)):
        if not abs(a - b) <= EXECUTOR_TOLERANCE * max(1.0, abs(a)):
            return f"loss is {b:.7g}, not {a:.7g}"
    if abs(score.correct - other_score.correct) > 1:  # two logits within round-off of each other may swap
        return f"{other_score.correct} correct labels, not {score.correct}"
    outputs, others = (each.predict(theta, samples) for each in (model, light))
    if outputs.shape != others.shape or not _relative(others, outputs) <= EXECUTOR_TOLERANCE:
        return "outputs differ"
    return ""


def _compare(model: OrtModel, bundle: TaskBundle, flat: FlatModel, theta: Tensor, x: Tensor, y: Tensor) -> str | None:
    """Return a description of the first difference, an empty string, or None at a kink.

    There torch's own gradient differs next to theta, or from that in float64.
    """
    loss, correct, gradient, outputs = (value.detach().numpy() for value in flat.everything(theta, x, y))
    vector, samples, labels = theta.numpy(), x.numpy(), y.numpy()
    ort_loss, ort_gradient = model.grad(vector, samples, labels)
    score = model.score(vector, samples, labels)
    distance = _relative(ort_gradient, gradient)
    # Negated, so that NaN counts as a difference.
    if not distance <= TOLERANCE:
        exact = _in_float64(flat, theta, x, y)
        if exact is not None and _relative(gradient, exact) > TOLERANCE:
            return None
        near = (theta * (1 + _NEAR * torch.randn_like(theta)) for _ in range(_NEIGHBOURS))
        if any(_relative(flat.everything(each, x, y)[2].detach().numpy(), gradient) > TOLERANCE for each in near):
            return None
        worst = _worst_layer(bundle, ort_gradient - gradient)
        return f"gradient differs by {distance:.1e} (at most {TOLERANCE:.0e}), most in layer {worst!r}"
    for name, value in (("grad", ort_loss), ("score", score.mean_loss)):
        if not abs(value - float(loss)) <= TOLERANCE * max(1.0, abs(float(loss))):
            return f"loss of {name}.onnx is {value:.7g}, torch has {float(loss):.7g}"
    if score.correct != int(correct) and len(x) == 1:
        return f"{score.correct} correct labels, torch counts {int(correct)}"
    if abs(score.correct - int(correct)) > 1:  # two logits within round-off of each other may swap
        return f"{score.correct} correct labels, torch counts {int(correct)}"
    predicted = model.predict(vector, samples)
    if predicted.shape != outputs.shape or not _relative(predicted, outputs) <= TOLERANCE:
        return "outputs of predict.onnx differ"
    return ""


def _in_float64(flat: FlatModel, theta: Tensor, x: Tensor, y: Tensor) -> npt.NDArray[np.float64] | None:
    """Return torch's gradient (d,) in float64; None for a module that makes float32 numbers by itself, which torch won't mix."""
    try:
        samples, labels = (value.double() if value.is_floating_point() else value for value in (x, y))
        gradient: npt.NDArray[np.float64] = flat.everything(theta.double(), samples, labels)[2].detach().numpy()
    except RuntimeError:
        return None
    return gradient


def _check_mean(model: OrtModel, theta: Float32Vector, x: Tensor, y: Tensor) -> None:
    """Check that the loss is a mean over samples, since large batches are evaluated in chunks.

    Raises:
        TaskError: it is not.
    """
    samples, labels, cut = x.numpy(), y.numpy(), PARTIAL_BATCH
    parts = (slice(None), slice(cut), slice(cut, None))
    losses = np.array(
        [[model.grad(scale * theta, samples[p], labels[p])[0] for p in parts] for scale in (1.0, 0.5, 0.25)]
    )
    whole, first, second = losses.T
    # whole = share first + (1 - share) second, at every theta: the samples' weights depend on their labels alone.
    step = first - second
    share = float(step @ (whole - second) / max(float(step @ step), 1e-30))
    apart = np.abs(second + min(max(share, 0.0), 1.0) * step - whole)
    if not (apart <= MEAN_TOLERANCE * np.maximum(1.0, np.abs(whole))).all():
        raise TaskError(
            "the loss is not a mean over samples, nor one weighted by their labels",
            hint="use reduction='mean' and no statistics of the batch",
        )


def _relative(a: Float32Vector, b: npt.NDArray[np.floating[Any]]) -> float:
    difference = float(np.linalg.norm((a.astype(np.float64) - b).ravel()))
    return difference / max(float(np.linalg.norm(b.astype(np.float64).ravel())), 1e-12)


def _worst_layer(bundle: TaskBundle, difference: Float32Vector) -> str:
    """Return the parameter whose part of ``difference`` (d,) is longest, counting NaN as longest."""
    at, worst, longest = 0, "", -1.0
    for parameter in bundle.manifest.parameters:
        norm = float(np.linalg.norm(difference[at : at + parameter.length]))
        norm = np.inf if np.isnan(norm) else norm
        if norm > longest:
            worst, longest = parameter.name, norm
        at += parameter.length
    return worst
