"""What a device does with its own cluster's model, or those above it: predict, and write one as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client import export as exporting
from edge_client import kept
from edge_client.data import load_inputs
from edge_client.enrolment import DeviceMembership
from edge_client.model import OrtModel
from edge_client.package import reopen
from edge_client.state import DeviceState, OwnModel
from edge_client.task import TaskBundle
from wire.errors import ConfigError, IntegrityError


def _model(directory: Path) -> tuple[TaskBundle, OwnModel]:
    membership = DeviceMembership(directory)
    files = DeviceState(directory)
    model = files.load_model()
    package = files.load_run()
    if package is None:
        raise IntegrityError(f"{directory} holds no run", hint="let the device take part in one")
    run = reopen(package, files.load_epoch(), membership)
    if run.plan.run_id != model.run_id:
        raise IntegrityError(
            f"the model is of run {model.run}, the task of run {run.plan.run}",
            hint="let the device finish a round of the new run",
        )
    return run.bundle, model


def predict(directory: Path, source: Path, *, node: int | None = None, ensemble: bool = False) -> NDArray[Any]:
    """Return one answer a sample: the class for classification, the task's outputs otherwise.

    Args:
        directory: the device's.
        source: samples in any format that training takes; labels may be there and are not looked at.
        node: answer with the model of this node of cfl's tree, which must lie on the device's path; None stands for
            its own cluster's.
        ensemble: answer with the average of the outputs of all models on the path (cfl section V-C).

    Raises:
        ConfigError: the device does not hold the node's model, or both a node and the ensemble are asked for.
    """
    if ensemble and node is not None:
        raise ConfigError("one node or the ensemble of all, not both", hint="leave --node or --ensemble away")
    bundle, own = _model(directory)
    models = [*kept.above(directory, own), own] if ensemble else [kept.pick(directory, own, node)]
    backend, inputs = OrtModel(bundle), load_inputs(source, bundle.manifest)
    outputs = backend.predict(models[0].theta, inputs)
    for model in models[1:]:
        outputs = outputs + backend.predict(model.theta, inputs)
    if bundle.manifest.kind == "regression":
        return outputs / np.float32(len(models))
    answer: NDArray[np.int64] = outputs.argmax(axis=-1)
    return answer


def export(directory: Path, output: Path, *, node: int | None = None) -> OwnModel:
    """Write the model of ``node``, by default of the device's own cluster, as a self-contained ONNX file; return it."""
    bundle, own = _model(directory)
    model = kept.pick(directory, own, node)
    exporting.export(bundle, model.theta, output)
    return model
