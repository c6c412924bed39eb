"""Evaluate a task: one executor for each graph, created on first use and shared by all k models."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, runtime_checkable

import numpy as np

from edge_client.learning.executor.base import SCORE_ROWS, Executor, Graph, MakeExecutor, in_chunks
from shoal.errors import TaskError
from shoal.task.manifest import GRAPH_NAMES

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from shoal.protocol.recipe import LocalTraining
    from shoal.task.bundle import TaskBundle
    from shoal.types import Float32Vector

GRAD_ROWS: Final = 100
"""Samples in one backward pass; the gradients of a larger batch are summed chunk by chunk.

600 samples of the 28x28 CNN: 1.4 s and 219 MB at 100, 2.3 s and 370 MB at 256, 4.1 s and 726 MB in one piece.
"""


@dataclass(frozen=True, slots=True)
class Score:
    """A model's fit to some samples.

    Attributes:
        mean_loss: mean over all labels.
        correct: labels predicted right; 0 for regression.
        count: labels seen (samples, or positions of a sequence task).
    """

    mean_loss: float
    correct: int
    count: int


class Backend(Protocol):
    """Interface to a task's graphs for scoring, training and prediction; `GraphModel` is one implementation."""

    def score(self, theta: Float32Vector, x: NDArray[Any], y: NDArray[Any]) -> Score:
        """Return loss and correct count of theta (d,) float32 on n samples."""

    def grad(self, theta: Float32Vector, x: NDArray[Any], y: NDArray[Any]) -> tuple[float, Float32Vector]:
        """Return mean loss and its gradient (d,) float32, an array that the caller may overwrite, and so may the next call."""

    def predict(self, theta: Float32Vector, x: NDArray[Any]) -> NDArray[np.float32]:
        """Return the model's outputs for n samples, first dimension n."""


@runtime_checkable
class OwnTraining(Protocol):
    """What a backend has besides if it trains by itself; `edge_client.learning.trainer.model.TrainerModel` is one."""

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
        """Return the trained model (d,) float32, the mean training loss and the number of steps."""

    def losses(
        self, theta: Float32Vector, x: NDArray[Any], y: NDArray[Any], cancelled: Callable[[], bool]
    ) -> NDArray[np.float64]:
        """Return the loss of each sample, shape (n,), float64."""


class GraphModel:
    """A task's graphs in one kind of executor, each loaded on first use.

    Args:
        bundle: the checked task.
        make: loads a graph.
        threads: threads of one operation.
    """

    def __init__(self, bundle: TaskBundle, make: MakeExecutor, threads: int = 1) -> None:
        self._bundle = bundle
        self._length = bundle.manifest.length
        self._make = make
        self._threads = threads
        self._executors: dict[str, Executor] = {}

    def score(self, theta: Float32Vector, x: NDArray[Any], y: NDArray[Any]) -> Score:
        """Return mean loss, correct labels and label count of ``theta`` on the samples.

        Args:
            theta: shape (d,), float32.
            x: shape (n, *input shape), the task's input dtype.
            y: shape (n, *label shape), the task's label dtype.
        """
        self._check(theta, x, y)
        total, correct = 0.0, 0
        for at in range(0, len(x), SCORE_ROWS):
            rows = slice(at, at + SCORE_ROWS)
            loss, right = self._run("score", {"theta": theta, "x": x[rows], "y": y[rows]})
            total += float(loss) * len(x[rows])
            correct += int(right)
        return Score(total / len(x), correct, y.size)

    def grad(self, theta: Float32Vector, x: NDArray[Any], y: NDArray[Any]) -> tuple[float, Float32Vector]:
        """Return the mean loss and its gradient with respect to ``theta``, (d,) float32.

        The caller may overwrite the gradient, and so may the next call.

        Args:
            theta: shape (d,), float32.
            x: shape (n, *input shape).
            y: shape (n, *label shape).
        """
        self._check(theta, x, y)
        if len(x) <= GRAD_ROWS:  # a single chunk needs no weight
            loss, part = self._run("grad", {"theta": theta, "x": x, "y": y})
            return float(loss), part
        total, gradient = 0.0, None
        for at in range(0, len(x), GRAD_ROWS):
            rows = slice(at, at + GRAD_ROWS)
            loss, part = self._run("grad", {"theta": theta, "x": x[rows], "y": y[rows]})
            share = len(x[rows]) / len(x)
            total += share * float(loss)
            part *= np.float32(share)
            gradient = part.copy() if gradient is None else np.add(gradient, part, out=gradient)
        assert gradient is not None
        return total, gradient

    def predict(self, theta: Float32Vector, x: NDArray[Any]) -> NDArray[np.float32]:
        """Return the model's outputs, shape (n, ...), float32.

        Args:
            theta: shape (d,), float32.
            x: shape (n, *input shape).
        """
        self._check(theta, x)
        return in_chunks(lambda rows: self._run("predict", {"theta": theta, "x": rows})[0], x)

    def _run(self, graph: str, feed: dict[str, NDArray[Any]]) -> list[Any]:
        return self._executor(graph).run(feed)

    def _executor(self, graph: str) -> Executor:
        found = self._executors.get(graph)
        if found is None:
            found = self._make(Graph(graph, getattr(self._bundle, graph), self._threads))
            self._check_signature(graph, found)
            self._executors[graph] = found
        return found

    def _check_signature(self, graph: str, executor: Executor) -> None:
        """Refuse a graph whose inputs or outputs differ from the manifest."""
        manifest = self._bundle.manifest
        expected = {
            "theta": ((manifest.length,), "float32"),
            "x": (manifest.input.shape, manifest.input.dtype),
            "y": (manifest.label.shape, manifest.label.dtype),
        }
        if graph == "predict":
            del expected["y"]
        outputs = {"score": ["loss", "correct"], "grad": ["loss", "grad"], "predict": ["outputs"]}[graph]
        found = {i.name: (i.shape if i.name == "theta" else i.shape[1:], i.dtype) for i in executor.inputs}
        if found != expected or list(executor.outputs) != outputs:
            raise TaskError(f"{graph}.onnx does not have the inputs and outputs that task.toml promises")

    def _check(self, theta: Float32Vector, x: NDArray[Any], y: NDArray[Any] | None = None) -> None:
        manifest = self._bundle.manifest
        if theta.shape != (self._length,) or theta.dtype != np.float32 or not theta.flags.c_contiguous:
            raise TaskError(f"theta must be a contiguous float32 vector of {self._length} coordinates")
        if len(x) == 0 or x.shape[1:] != manifest.input.shape or x.dtype != manifest.input.dtype:
            raise TaskError(f"x has shape {x.shape} and dtype {x.dtype}, not what the task expects")
        if y is not None and (y.shape != (len(x), *manifest.label.shape) or y.dtype != manifest.label.dtype):
            raise TaskError(f"y has shape {y.shape} and dtype {y.dtype}, not what the task expects")


class OrtModel(GraphModel):
    """A task's graphs in ONNX Runtime, each loaded on first use."""

    def __init__(self, bundle: TaskBundle, threads: int = 1) -> None:
        from edge_client.learning.executor.onnx_runtime import OrtExecutor

        super().__init__(bundle, OrtExecutor, threads)


class NumpyModel(GraphModel):
    """A task's graphs in numpy; all are read at once, so that a task is refused before it is trained.

    Raises:
        TaskError: a graph has an operator that the numpy executor lacks.
    """

    def __init__(self, bundle: TaskBundle, threads: int = 1) -> None:
        from edge_client.learning.executor.numpy_graph import NumpyExecutor

        super().__init__(bundle, NumpyExecutor, threads)
        for graph in GRAPH_NAMES:
            self._executor(graph)
