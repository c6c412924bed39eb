"""Executor by ONNX Runtime, on the CPU."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edge_client.learning.executor.base import Graph
from shoal.errors import TaskError
from shoal.task.onnx_contents import TensorType
from shoal.util.telemetry import import_onnxruntime

if TYPE_CHECKING:
    from numpy.typing import NDArray

GRADIENT: Final = "grad"
"""Name of the graph that local training runs at every step."""
_SEVERITY_ERROR: Final = 3
_ERRORS: Final = ("Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NotImplemented", "RuntimeException")
_DTYPES: Final[Mapping[str, str]] = {"tensor(float)": "float32"}
"""ONNX Runtime's element types whose name in numpy is another."""


class OrtExecutor:
    """A session of ONNX Runtime; see `Executor`."""

    def __init__(self, graph: Graph) -> None:
        """Load a graph.

        Raises:
            TaskError: ONNX Runtime is missing or refuses the graph.
        """
        self._file = graph.file
        ort = _import()
        state = importlib.import_module("onnxruntime.capi.onnxruntime_pybind11_state")
        # With bound outputs all errors are RuntimeErrors.
        self._errors: tuple[type[Exception], ...] = (RuntimeError, *(getattr(state, name) for name in _ERRORS))
        try:
            self._session = ort.InferenceSession(
                graph.model, _options(ort, graph.threads), providers=["CPUExecutionProvider"]
            )
        except self._errors as error:
            raise self._refused(error) from None
        self.inputs: Sequence[TensorType] = tuple(_type_of(each) for each in self._session.get_inputs())
        outputs = tuple(_type_of(each) for each in self._session.get_outputs())
        self.outputs: Sequence[str] = tuple(each.name for each in outputs)
        self._bound = _Bound(self._session, outputs) if graph.name == GRADIENT else None

    def run(self, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the outputs; see `Executor.run`.

        A gradient is always in the same memory: new memory at every step would push the model out of the processor's cache,
        which costs a seventh of the time where many devices share one.
        """
        try:
            if self._bound is not None:
                return self._bound.run(feed)
            outputs: list[NDArray[Any]] = self._session.run(None, dict(feed))
        except self._errors as error:
            raise self._refused(error) from None
        return outputs

    def _refused(self, error: Exception) -> TaskError:
        reason = str(error).splitlines()[0][:300] if str(error) else "no reason"
        return TaskError(f"ONNX Runtime refused {self._file}: {reason}")


class _Bound:
    """Runs a graph whose inputs and outputs stay bound to the same memory from one run to the next.

    Args:
        session: the graph's.
        outputs: their types.
    """

    def __init__(self, session: Any, outputs: Sequence[TensorType]) -> None:
        self._session, self._binding = session, session.io_binding()
        self._inputs: dict[str, tuple[tuple[Any, ...], NDArray[Any]]] = {}
        self._names = [each.name for each in outputs]
        self._buffers: list[NDArray[Any] | None] = []
        for each in outputs:
            lengths = [n for n in each.shape if n is not None]
            if len(lengths) == len(each.shape) > 0:
                self._buffers.append(self._bind(each.name, np.empty(lengths, each.dtype)))
            else:  # ONNX Runtime does not tell a scalar from an output of unknown shape
                self._binding.bind_output(each.name)
                self._buffers.append(None)

    def run(self, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the outputs for ``feed``; the next call may overwrite them."""
        for name, array in feed.items():
            # Training passes the same buffers at every step, and to bind them again takes longer than to compare them.
            told = array.__array_interface__
            place = told["data"][0], told["shape"], told["typestr"], told["strides"]
            bound, _ = self._inputs.get(name, (None, None))
            if bound != place or place[-1] is not None:  # with strides, ONNX Runtime has bound a copy
                self._binding.bind_cpu_input(name, array)
                self._inputs[name] = place, array
        self._session.run_with_iobinding(self._binding)
        return [self._found(at) if buffer is None else buffer for at, buffer in enumerate(self._buffers)]

    def _found(self, at: int) -> NDArray[Any]:
        """Return an output of unknown shape; from then on a scalar has a buffer."""
        found: NDArray[Any] = self._binding.get_outputs()[at].numpy()
        if found.shape == ():
            self._buffers[at] = self._bind(self._names[at], found.copy())
        return found

    def _bind(self, name: str, buffer: NDArray[Any]) -> NDArray[Any]:
        self._binding.bind_output(name, "cpu", 0, buffer.dtype.type, list(buffer.shape), buffer.ctypes.data)
        return buffer


def _import() -> Any:
    try:
        return import_onnxruntime()
    except ImportError as error:
        raise TaskError(
            f"ONNX Runtime can't be loaded: {error}",
            hint="install it with: pip install 'shoal[edge]', or set executor to numpy",
        ) from None


def _options(ort: Any, threads: int) -> Any:
    """Return session options that prefer low memory to speed."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = _SEVERITY_ERROR
    # No arena that holds freed memory, and no threads that spin while they wait.
    options.enable_cpu_mem_arena = False
    options.enable_mem_pattern = False
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def _type_of(value: Any) -> TensorType:
    """Return an input's type; dimensions that are not numbers are None."""
    dtype = _DTYPES.get(value.type, value.type.removeprefix("tensor(").removesuffix(")"))
    return TensorType(value.name, dtype, tuple(n if isinstance(n, int) else None for n in value.shape))
