"""The backend of a task on a device: its graphs in an executor, or the operator's own training code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from edge_client.learning.executor.choice import AUTO, NUMPY, TrainerCommand, choose
from edge_client.learning.model import Backend, NumpyModel, OrtModel
from edge_client.learning.trainer.model import TrainerModel

if TYPE_CHECKING:
    from shoal.task.bundle import TaskBundle


def make_model(setting: str, trainer: TrainerCommand | None = None) -> Callable[[TaskBundle, int], Backend]:
    """Return the maker of a device's models.

    Args:
        setting: auto, onnxruntime or numpy, as in a device's configuration.
        trainer: own training code, for tasks that name one.
    """
    graphs = NumpyModel if choose(setting) == NUMPY else OrtModel

    def make(bundle: TaskBundle, threads: int = 1) -> Backend:
        if bundle.manifest.trainer is not None:
            return TrainerModel(bundle, trainer)
        return graphs(bundle, threads)

    return make


def device_model(bundle: TaskBundle, threads: int = 1) -> Backend:
    """Return the model of a device that is not configured: in ONNX Runtime if it is installed, else in numpy."""
    return make_model(AUTO)(bundle, threads)
