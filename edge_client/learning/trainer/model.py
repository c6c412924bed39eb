"""The backend of a task on a device: its graphs in an executor, or own training code where the task names a trainer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from edge_client.learning.executor.choice import AUTO, NUMPY, TrainerCommand, choose
from edge_client.learning.model import Backend, NumpyModel, OrtModel, Score
from edge_client.learning.trainer.child import layout_lines
from edge_client.learning.trainer.messages import Answer, Area, Request
from edge_client.learning.trainer.process import TrainerProcess
from shoal.errors import TaskError, TrainerError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shoal.protocol.recipe import LocalTraining
    from shoal.task.bundle import TaskBundle
    from shoal.types import Float32Vector


class TrainerModel:
    """A backend whose process begins with the first call, in the thread of that call.

    Args:
        bundle: a task that names a trainer.
        command: the trainer that this device's operator has given; None if there is none.

    Raises:
        TrainerError: there is none.
    """

    def __init__(self, bundle: TaskBundle, command: TrainerCommand | None) -> None:
        manifest = bundle.manifest
        assert manifest.trainer is not None
        if command is None:
            raise TrainerError(
                f"the task needs the trainer {manifest.trainer.name} {manifest.trainer.version}, and this device has none",
                hint="install it, and give --trainer PACKAGE:CLASS, or SHOAL_EDGE_TRAINER to commands without that option",
            )
        self._manifest, self._wanted = manifest, manifest.trainer
        self._process = TrainerProcess(command)

    def train(
        self,
        theta0: Float32Vector,
        x: NDArray[Any],
        y: NDArray[Any],
        settings: LocalTraining,
        *,
        seed: int,
        cancelled: Callable[[], bool],
    ) -> tuple[Float32Vector, float, int]:
        """Return the trained model (d,) float32, the mean training loss and the number of steps.

        Args:
            theta0: shape (d,), float32.
            x: samples.
            y: labels.
            settings: with the step size of this round.
            seed: 32 bits.
            cancelled: ends the training when it returns true.

        Raises:
            TrainerError: own code failed.
        """
        answer, theta = self._ask("train", (theta0, x, y), None, cancelled, recipe=settings, seed=seed)
        return theta, answer.loss, answer.steps

    def losses(
        self,
        theta: Float32Vector,
        x: NDArray[Any],
        y: NDArray[Any],
        cancelled: Callable[[], bool] = lambda: False,
    ) -> NDArray[np.float64]:
        """Return the loss of each sample, shape (n,), float64, which may not be finite."""
        return self._ask("losses", (theta, x, y), Area("float64", (len(x),)), cancelled)[1]

    def score(self, theta: Float32Vector, x: NDArray[Any], y: NDArray[Any]) -> Score:
        """Return mean loss, correct labels and label count of ``theta`` on the samples."""
        answer, losses = self._ask("score", (theta, x, y), Area("float64", (len(x),)))
        if not 0 <= answer.correct <= y.size:
            raise TrainerError(f"the trainer answers {answer.correct} of {y.size} labels right")
        return Score(float(losses.mean()), answer.correct, y.size)

    def grad(self, *_: Any) -> tuple[float, Float32Vector]:
        """Refuse: own code trains by itself."""
        raise TaskError("a trainer has no gradient of a batch")

    def predict(self, theta: Float32Vector, x: NDArray[Any]) -> NDArray[np.float32]:
        """Return the model's outputs, shape (n, ...), float32."""
        label = self._manifest.label
        shape = (len(x), *label.shape, *((label.limit,) if self._manifest.kind != "regression" else ()))
        outputs = self._ask("predict", (theta, x), Area("float32", shape))[1]
        if not np.isfinite(outputs).all():
            raise TrainerError("the trainer's answers are not finite")
        return outputs

    def _ask(
        self,
        action: str,
        inputs: tuple[NDArray[Any], ...],
        result: Area | None,
        cancelled: Callable[[], bool] = lambda: False,
        **more: Any,
    ) -> tuple[Answer, NDArray[Any]]:
        self.begin(cancelled)
        areas = (*map(_area, inputs), *(() if result is None else (result,)))
        return self._process.ask(Request(action=action, areas=areas, **more), inputs, cancelled)

    def begin(self, cancelled: Callable[[], bool] = lambda: False) -> None:
        """Begin the process if it does not run, and compare the trainer with the task's.

        Raises:
            TrainerError: it is another, or fails.
        """
        if not self._process.runs:
            layout = "\n".join(layout_lines({p.name: p.shape for p in self._manifest.parameters}))
            lines = np.frombuffer(layout.encode(), np.uint8)
            wanted = self._wanted
            begin = Request(action="begin", areas=(_area(lines),), name=wanted.name, version=wanted.version)
            self._process.ask(begin, (lines,), cancelled)


def _area(array: NDArray[Any]) -> Area:
    return Area(array.dtype.name, array.shape)


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
