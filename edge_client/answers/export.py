"""Write a trained model as one ordinary ONNX file, which can be used without Shoal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edge_client.learning.standardisation import LARGEST
from shoal.errors import TaskError
from shoal.task.onnx_graph import add_metadata, add_softmax, bind_input, standardise_input
from shoal.util.files import write_atomic

if TYPE_CHECKING:
    from collections.abc import Mapping

    from edge_client.storage.scales import Scale
    from shoal.task.bundle import TaskBundle
    from shoal.types import Float32Vector

OUTPUTS: Final = "outputs"
PROBABILITIES: Final = "probabilities"


def export(
    bundle: TaskBundle,
    theta: Float32Vector,
    path: Path,
    scale: Scale | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write `onnx_pieces` to a file, replaced atomically.

    Raises:
        TaskError: as `onnx_pieces`.
        ConfigError: the file can't be written.
    """
    write_atomic(path, *onnx_pieces(bundle, theta, scale, facts or {}))


def onnx_pieces(
    bundle: TaskBundle, theta: Float32Vector, scale: Scale | None, facts: Mapping[str, Any]
) -> tuple[bytes, memoryview]:
    """Return predict.onnx with ``theta`` as a constant, which comes last: head and body of the file.

    It takes ``x`` alone and returns ``outputs``, and ``probabilities`` if the task has classes. `facts_of` and ``facts`` are its
    metadata, as texts: names stand one in a line, and None is left out.

    Args:
        bundle: the task.
        theta: shape (d,), float32, the model.
        scale: standardises ``x`` inside the file; None if the task does not standardise.
        facts: numbers, texts, or tuples of names.

    Raises:
        TaskError: theta does not fit the task or is not finite, or the task has no graphs.
    """
    if bundle.manifest.trainer is not None:
        raise TaskError(
            "a model of own training code has no ONNX form", hint="shoal-fleet models get writes its parameters by name"
        )
    if theta.shape != (bundle.length,) or theta.dtype != np.float32:
        raise TaskError(f"the model must be a float32 vector of {bundle.length} coordinates, not {theta.shape}")
    if not np.isfinite(theta).all():
        raise TaskError("the model holds numbers that are not finite")
    graph = bundle.predict
    if bundle.manifest.kind != "regression":
        graph = add_softmax(graph, OUTPUTS, PROBABILITIES)
    if scale is not None:
        shape = bundle.manifest.input.shape
        graph = standardise_input(graph, "x", scale.means, scale.deviations, shape, largest=LARGEST)
    known = {**facts_of(bundle), **facts}
    texts = {name: "\n".join(v) if isinstance(v, tuple) else str(v) for name, v in known.items() if v is not None}
    values = np.ascontiguousarray(theta, dtype="<f4")
    return bind_input(add_metadata(graph, texts), "theta", bundle.length), values.view(np.uint8).data


def facts_of(bundle: TaskBundle) -> dict[str, Any]:
    """Return what a program has to know of a task: its name and kind, and the names of values and classes, in order."""
    manifest = bundle.manifest
    return {
        "task": manifest.name,
        "kind": manifest.kind,
        "features": manifest.data.features,
        "labels": manifest.data.labels,
    }
