"""Evaluate a task with ONNX Runtime: one session for each graph, created on first use and shared by all k models."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol

import numpy as np

from shoal.errors import TaskError
from shoal.util.telemetry import import_onnxruntime

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shoal.task.bundle import TaskBundle
    from shoal.types import Float32Vector

SCORE_ROWS: Final = 100
"""Samples in one forward pass: the activations of larger chunks cost memory and gain no speed."""

GRAD_ROWS: Final = 100
"""Samples in one backward pass; the gradients of a larger batch are summed chunk by chunk.

600 samples of the 28x28 CNN: 1.4 s and 219 MB at 100, 2.3 s and 370 MB at 256, 4.1 s and 726 MB in one piece.
"""

_SEVERITY_ERROR: Final = 3
_ONNX_DTYPE: Final = {"float32": "tensor(float)", "int64": "tensor(int64)"}
_ERRORS: Final = ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NotImplemented", "RuntimeException")


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
    """Interface to a task's graphs for scoring, training and prediction; `OrtModel` is one implementation."""

    def score(self, theta: Float32Vector, x: NDArray[Any], y: NDArray[Any]) -> Score:
        """Return loss and correct count of theta (d,) float32 on n samples."""

    def grad(self, theta: Float32Vector, x: NDArray[Any], y: NDArray[Any]) -> tuple[float, Float32Vector]:
        """Return mean loss and its gradient (d,) float32, an array that the caller may overwrite."""

    def predict(self, theta: Float32Vector, x: NDArray[Any]) -> NDArray[np.float32]:
        """Return the model's outputs for n samples, first dimension n."""


class OrtModel:
    """A task's graphs in ONNX Runtime (CPU).

    Args:
        bundle: the checked task.
        threads: intra-operator threads.
    """

    def __init__(self, bundle: TaskBundle, threads: int = 1) -> None:
        self._bundle = bundle
        self._length = bundle.manifest.length
        self._threads = threads
        self._sessions: dict[str, Any] = {}
        self._errors: tuple[type[Exception], ...] = ()

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
        """Return the mean loss and its gradient with respect to ``theta``, (d,) float32; the caller may overwrite it.

        Args:
            theta: shape (d,), float32.
            x: shape (n, *input shape).
            y: shape (n, *label shape).
        """
        self._check(theta, x, y)
        total, gradient = 0.0, None
        for at in range(0, len(x), GRAD_ROWS):
            rows = slice(at, at + GRAD_ROWS)
            loss, part = self._run("grad", {"theta": theta, "x": x[rows], "y": y[rows]})
            if len(x) <= GRAD_ROWS:  # a single chunk needs no weight
                return float(loss), part
            share = len(x[rows]) / len(x)
            total += share * float(loss)
            part *= np.float32(share)
            gradient = part if gradient is None else np.add(gradient, part, out=gradient)
        assert gradient is not None
        return total, gradient

    def predict(self, theta: Float32Vector, x: NDArray[Any]) -> NDArray[np.float32]:
        """Return the model's outputs, shape (n, ...), float32.

        Args:
            theta: shape (d,), float32.
            x: shape (n, *input shape).
        """
        self._check(theta, x)
        parts = []
        for at in range(0, len(x), SCORE_ROWS):
            (outputs,) = self._run("predict", {"theta": theta, "x": x[at : at + SCORE_ROWS]})
            parts.append(outputs)
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _run(self, graph: str, feed: dict[str, NDArray[Any]]) -> list[Any]:
        session = self._session(graph)
        try:
            outputs: list[Any] = session.run(None, feed)
        except self._errors as error:
            raise _refused(graph, error) from None
        return outputs

    def _session(self, graph: str) -> Any:
        session = self._sessions.get(graph)
        if session is not None:
            return session
        try:
            ort = import_onnxruntime()
        except ImportError as error:
            raise TaskError(
                f"ONNX Runtime can't be loaded: {error}", hint="install it with: pip install 'shoal[edge]'"
            ) from None
        state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
        self._errors = tuple(getattr(state, name) for name in _ERRORS)
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = _SEVERITY_ERROR
        # Prefer low memory to speed: no arena that holds freed memory, and no threads that spin while they wait.
        options.enable_cpu_mem_arena = False
        options.enable_mem_pattern = False
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
        try:
            session = ort.InferenceSession(getattr(self._bundle, graph), options, providers=["CPUExecutionProvider"])
        except self._errors as error:
            raise _refused(graph, error) from None
        self._check_signature(graph, session)
        self._sessions[graph] = session
        return session

    def _check_signature(self, graph: str, session: Any) -> None:
        """Refuse a graph whose inputs or outputs differ from the manifest."""
        manifest = self._bundle.manifest
        expected = {
            "theta": ((manifest.length,), "tensor(float)"),
            "x": (manifest.input.shape, _ONNX_DTYPE[manifest.input.dtype]),
            "y": (manifest.label.shape, _ONNX_DTYPE[manifest.label.dtype]),
        }
        if graph == "predict":
            del expected["y"]
        outputs = {"score": ["loss", "correct"], "grad": ["loss", "grad"], "predict": ["outputs"]}[graph]
        found = {
            i.name: (tuple(i.shape) if i.name == "theta" else tuple(i.shape[1:]), i.type) for i in session.get_inputs()
        }
        if found != expected or [o.name for o in session.get_outputs()] != outputs:
            raise TaskError(f"{graph}.onnx does not have the inputs and outputs that task.toml promises")

    def _check(self, theta: Float32Vector, x: NDArray[Any], y: NDArray[Any] | None = None) -> None:
        manifest = self._bundle.manifest
        if theta.shape != (self._length,) or theta.dtype != np.float32 or not theta.flags.c_contiguous:
            raise TaskError(f"theta must be a contiguous float32 vector of {self._length} coordinates")
        if len(x) == 0 or x.shape[1:] != manifest.input.shape or x.dtype != manifest.input.dtype:
            raise TaskError(f"x has shape {x.shape} and dtype {x.dtype}, not what the task expects")
        if y is not None and (y.shape != (len(x), *manifest.label.shape) or y.dtype != manifest.label.dtype):
            raise TaskError(f"y has shape {y.shape} and dtype {y.dtype}, not what the task expects")


def _refused(graph: str, error: Exception) -> TaskError:
    return TaskError(
        f"ONNX Runtime refused {graph}.onnx: {str(error).splitlines()[0][:300] if str(error) else 'no reason'}"
    )
