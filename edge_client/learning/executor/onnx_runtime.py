"""Executor by ONNX Runtime, on the CPU."""

from __future__ import annotations

import importlib
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edge_client.learning.executor.base import Graph
from edge_client.learning.executor.parts import THETA, CutGraph, cut
from shoal.errors import TaskError
from shoal.task.onnx_contents import TensorType
from shoal.util.telemetry import import_onnxruntime

if TYPE_CHECKING:
    from numpy.typing import NDArray

GRADIENT_GRAPH: Final = "grad"
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
        options = _options(ort, graph.threads)

        def load(model: bytes) -> Any:
            return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])

        self.inputs: Sequence[TensorType]
        self.outputs: Sequence[str]
        self._bound = self._cut_and_bound(graph, load) if graph.name == GRADIENT_GRAPH else None
        if self._bound is None:
            try:
                self._session = load(graph.model)
            except self._errors as error:
                raise self._refused(error) from None
            self.inputs, outputs = _types(self._session)
            self.outputs = tuple(each.name for each in outputs)
            if graph.name == GRADIENT_GRAPH:
                self._bound = _Bound(self._session, outputs)

    def _cut_and_bound(self, graph: Graph, load: Callable[[bytes], Any]) -> _Bound | None:
        """Return the graph that takes and returns whole vectors in parts (see `parts`); None if it can't be."""
        found = cut(graph.model, graph.file)
        if found is None:
            return None
        try:
            session = load(found.model)
        except self._errors:  # the whole graph will say why
            return None
        _, outputs = _types(session)
        if not _fit(found, outputs):
            return None
        self.inputs, self.outputs = found.whole_inputs, found.whole_outputs
        return _Bound(session, outputs, found)

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

    Theta and the gradient have that memory only as long as the caller refers to them: a training frees both.

    Args:
        session: the graph's.
        outputs: their types.
        cut_graph: the graph, if it takes theta and returns the gradient in parts; then both are one array here.
    """

    def __init__(self, session: Any, outputs: Sequence[TensorType], cut_graph: CutGraph | None = None) -> None:
        self._session, self._binding = session, session.io_binding()
        self._inputs: dict[str, tuple[tuple[Any, ...], Callable[[], NDArray[Any] | None]]] = {}
        self._theta = cut_graph.inputs if cut_graph else ()
        self._names = cut_graph.whole_outputs if cut_graph else tuple(each.name for each in outputs)
        self._cut_graph = cut_graph
        self._gradient: Callable[[], NDArray[Any] | None] = _nothing
        self._types = {each.name: each for each in outputs}
        self._buffers = [self._own_buffer(self._types[name]) if name in self._types else None for name in self._names]

    def run(self, feed: Mapping[str, NDArray[Any]]) -> list[NDArray[Any]]:
        """Return the outputs for ``feed``; the next call may overwrite them."""
        for name, array in feed.items():
            # Training passes the same buffers at every step, and to bind them again takes longer than to compare them.
            told = array.__array_interface__
            place = told["data"][0], told["shape"], told["typestr"], told["strides"]
            bound, held = self._inputs.get(name, (None, _nothing))
            # With strides, ONNX Runtime has bound a copy.
            if bound != place or place[-1] is not None or held() is None:
                self._bind_input(name, array)
                self._inputs[name] = place, weakref.ref(array) if name == THETA else partial(np.asarray, array)
        gradient = self._bound_gradient()
        self._session.run_with_iobinding(self._binding)
        return [self._found(at, gradient) if buffer is None else buffer for at, buffer in enumerate(self._buffers)]

    def _bound_gradient(self) -> NDArray[Any] | None:
        """Return the memory of a gradient in parts, bound: that of the last run if the caller still has it."""
        if self._cut_graph is None:
            return None
        gradient = self._gradient()
        if gradient is None:
            gradient = np.empty(self._cut_graph.length, np.float32)
            for part in self._cut_graph.outputs:
                shape = [n for n in self._types[part.name].shape if n is not None]
                self._bind(part.name, gradient[part.start : part.stop].reshape(shape))
            self._gradient = weakref.ref(gradient)
        return gradient

    def _bind_input(self, name: str, array: NDArray[Any]) -> None:
        if not self._theta or name != THETA:
            self._binding.bind_cpu_input(name, array)
            return
        # ONNX Runtime reads the parts where they are, and trusts these lengths.
        length = self._theta[-1].stop
        if array.shape != (length,) or array.dtype != np.float32 or not array.flags.c_contiguous:
            raise RuntimeError(f"{name} is not a contiguous vector of {length} float32 coordinates")
        for part in self._theta:
            place = array[part.start : part.stop].ctypes.data
            self._binding.bind_input(part.name, "cpu", 0, np.float32, list(part.shape), place)

    def _found(self, at: int, gradient: NDArray[Any] | None) -> NDArray[Any]:
        """Return the gradient, or an output of unknown shape; from then on a scalar has a buffer."""
        if self._names[at] not in self._types:
            assert gradient is not None
            return gradient
        found: NDArray[Any] = self._binding.get_outputs()[at].numpy()
        if found.shape == ():
            self._buffers[at] = self._bind(self._names[at], found.copy())
        return found

    def _own_buffer(self, output: TensorType) -> NDArray[Any] | None:
        lengths = [n for n in output.shape if n is not None]
        if len(lengths) == len(output.shape) > 0:
            return self._bind(output.name, np.empty(lengths, output.dtype))
        self._binding.bind_output(output.name)  # ONNX Runtime does not tell a scalar from an output of unknown shape
        return None

    def _bind(self, name: str, buffer: NDArray[Any]) -> NDArray[Any]:
        self._binding.bind_output(name, "cpu", 0, buffer.dtype.type, list(buffer.shape), buffer.ctypes.data)
        return buffer


def _nothing() -> None:
    """Return nothing, as a reference to an array that is gone."""


def _types(session: Any) -> tuple[tuple[TensorType, ...], tuple[TensorType, ...]]:
    """Return the types of a session's inputs and outputs."""
    return tuple(map(_type_of, session.get_inputs())), tuple(map(_type_of, session.get_outputs()))


def _fit(cut_graph: CutGraph, outputs: Sequence[TensorType]) -> bool:
    """Return whether each part of the gradient has as many float32 numbers as its part of theta, whatever the inputs are."""
    types = {each.name: each for each in outputs}
    for part in cut_graph.outputs:
        found = types[part.name]
        sizes = [n for n in found.shape if n is not None]
        # An unknown shape looks like a scalar's.
        if found.dtype != "float32" or not sizes or len(sizes) < len(found.shape) or math.prod(sizes) != part.length:
            return False
    return True


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
