"""What a device does with its own cluster's model: predict, and write it as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from edge_client import export as exporting
from edge_client.data import load_inputs
from edge_client.enrolment import DeviceMembership
from edge_client.model import OrtModel
from edge_client.package import open_run
from edge_client.state import DeviceState, OwnModel
from edge_client.task import TaskBundle
from wire.errors import IntegrityError


def _model(directory: Path) -> tuple[TaskBundle, OwnModel]:
    membership = DeviceMembership(directory)
    files = DeviceState(directory)
    model = files.load_model()
    package = files.load_run()
    if package is None:
        raise IntegrityError(f"{directory} holds no run", hint="let the device take part in one")
    run = open_run(package, membership)
    if run.plan.run_id != model.run_id:
        raise IntegrityError(
            f"the model is of run {model.run}, the task of run {run.plan.run}",
            hint="let the device finish a round of the new run",
        )
    return run.bundle, model


def predict(directory: Path, source: Path) -> NDArray[Any]:
    """Return one answer a sample: the class for classification, the task's outputs otherwise.

    Args:
        directory: the device's.
        source: samples in any format that training takes; labels may be there and are not looked at.
    """
    bundle, model = _model(directory)
    outputs = OrtModel(bundle).predict(model.theta, load_inputs(source, bundle.manifest))
    if bundle.manifest.kind == "regression":
        return outputs
    answer: NDArray[np.int64] = outputs.argmax(axis=-1)
    return answer


def export(directory: Path, output: Path) -> OwnModel:
    """Write the model as a self-contained ONNX file and return it."""
    bundle, model = _model(directory)
    exporting.export(bundle, model.theta, output)
    return model
