"""Write a trained model as one ordinary ONNX file, which can be used without Shoal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from edge_client.learning.standardisation import LARGEST
from shoal.errors import TaskError
from shoal.task.onnx_graph import bind_input, standardise_input
from shoal.util.files import write_atomic

if TYPE_CHECKING:
    from edge_client.storage.scales import Scale
    from shoal.task.bundle import TaskBundle
    from shoal.types import Float32Vector


def export(bundle: TaskBundle, theta: Float32Vector, path: Path, scale: Scale | None = None) -> None:
    """Write predict.onnx with ``theta`` as a constant: the file takes ``x`` alone and returns ``outputs``.

    Args:
        bundle: the task.
        theta: shape (d,), float32, the model.
        path: the file to write, replaced atomically.
        scale: standardises ``x`` inside the file; None if the task does not standardise.

    Raises:
        TaskError: theta does not fit the task or is not finite, or the task has no graphs.
        ConfigError: the file can't be written.
    """
    if bundle.manifest.trainer is not None:
        raise TaskError(
            "a model of own training code has no ONNX form", hint="shoal-fleet models get writes its parameters by name"
        )
    if theta.shape != (bundle.length,) or theta.dtype != np.float32:
        raise TaskError(f"the model must be a float32 vector of {bundle.length} coordinates, not {theta.shape}")
    if not np.isfinite(theta).all():
        raise TaskError("the model holds numbers that are not finite")
    values = np.ascontiguousarray(theta, dtype="<f4")
    graph = bundle.predict
    if scale is not None:
        shape = bundle.manifest.input.shape
        graph = standardise_input(graph, "x", scale.means, scale.deviations, shape, largest=LARGEST)
    head = bind_input(graph, "theta", bundle.length)
    write_atomic(path, head, values.view(np.uint8).data)
