"""Compare a compiled bundle with torch before it is signed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
from torch import Tensor

from edge_client.learning.model import OrtModel
from shoal.errors import TaskError
from shoal.owner.task_compiler.flat import FlatModel
from shoal.task.bundle import TaskBundle
from shoal.types import Float32Vector

TOLERANCE: Final = 1e-5
"""Largest relative L2 distance to torch's gradient; float32 round-off reaches about 2e-6."""

PARTIAL_BATCH: Final = 7
_DRAWS: Final = 3
"""A ReLU or pool input within round-off of its kink may go either way, so one bad draw in three is accepted."""

Example = Callable[[int], tuple[Tensor, Tensor]]


def check(bundle: TaskBundle, flat: FlatModel, theta: Tensor, example: Example, full_batch: int) -> None:
    """Compare gradients, losses, counts and outputs with torch at batch sizes 1, PARTIAL_BATCH and ``full_batch``.

    Args:
        bundle: the compiled task.
        flat: the same task in torch.
        theta: shape (d,), float32, the parameters at which to compare.
        example: draws n samples.
        full_batch: the largest batch to try.

    Raises:
        TaskError: a result differs, with the layer whose gradient is worst; or the loss is not a mean over samples.
    """
    model = OrtModel(bundle)
    for size in sorted({1, PARTIAL_BATCH, full_batch}):
        failures = [
            failure for _ in range(_DRAWS - 1) if (failure := _compare(model, bundle, flat, theta, *example(size)))
        ]
        if len(failures) == 1 and (failure := _compare(model, bundle, flat, theta, *example(size))):
            failures.append(failure)
        if len(failures) > 1:
            raise TaskError(f"compiled task is not the torch model, batch of {size}: {failures[-1]}")
    _check_mean(model, theta.numpy(), *example(2 * PARTIAL_BATCH + 1))


def _compare(model: OrtModel, bundle: TaskBundle, flat: FlatModel, theta: Tensor, x: Tensor, y: Tensor) -> str:
    """Return a description of the first difference, or an empty string."""
    loss, correct, gradient, outputs = (value.detach().numpy() for value in flat.everything(theta, x, y))
    vector, samples, labels = theta.numpy(), x.numpy(), y.numpy()
    ort_loss, ort_gradient = model.grad(vector, samples, labels)
    score = model.score(vector, samples, labels)
    distance = _relative(ort_gradient, gradient)
    # Negated, so that NaN counts as a difference.
    if not distance <= TOLERANCE:
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


def _check_mean(model: OrtModel, theta: Float32Vector, x: Tensor, y: Tensor) -> None:
    """Check that the loss is a mean over samples, since large batches are evaluated in chunks.

    Raises:
        TaskError: it is not.
    """
    samples, labels, cut = x.numpy(), y.numpy(), PARTIAL_BATCH
    whole, _ = model.grad(theta, samples, labels)
    first, _ = model.grad(theta, samples[:cut], labels[:cut])
    second, _ = model.grad(theta, samples[cut:], labels[cut:])
    mean = (first * cut + second * (len(samples) - cut)) / len(samples)
    if not abs(whole - mean) <= 1e-4 * max(1.0, abs(whole)):
        raise TaskError(
            "the loss is not a mean over samples", hint="use reduction='mean' and no statistics of the batch"
        )


def _relative(a: Float32Vector, b: Float32Vector) -> float:
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
