"""Whole graphs in numpy: against ONNX Runtime, hostile ones, and the life of their values."""

from __future__ import annotations

import weakref
from contextlib import suppress
from itertools import pairwise

import numpy as np
import pytest
from onnx import TensorProto, helper

from edge_client.learning.executor import arithmetic, numpy_graph
from edge_client.learning.executor.base import Graph
from edge_client.learning.executor.numpy_graph import NumpyExecutor
from shoal.errors import TaskError
from tests.helpers.executors import executors
from tests.helpers.scans import body, scan
from tests.helpers.tasks import constant, graph, logistic_models, samples

FLOAT, INT64 = TensorProto.FLOAT, TensorProto.INT64
X, Y = ("x", FLOAT, ["n", 2]), ("y", FLOAT, ["n", 2])
NODE = helper.make_node


def made(nodes, inputs=(X,), outputs=(Y,), **extra):
    return NumpyExecutor(Graph("score", graph(nodes, inputs, outputs, **extra).SerializeToString()))


def theta(seed=0):
    return np.random.default_rng(seed).standard_normal(15).astype(np.float32)


def test_a_caller_may_overwrite_every_output():
    """An output that is an input, a constant or another output as well is copied."""
    outputs = [(name, FLOAT, None) for name in ("same", "flat", "again", "fixed", "wide")]
    nodes = [
        NODE("Identity", ["x"], ["same"]),
        NODE("Identity", ["x"], ["again"]),
        NODE("Transpose", ["x"], ["flat"]),
        NODE("Identity", ["c"], ["fixed"]),
        NODE("Expand", ["c", "s"], ["wide"]),
    ]
    held = [constant("c", np.ones(2, np.float32)), constant("s", np.array([3, 2]))]
    executor = made(nodes, outputs=outputs, initializer=held)
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    found = executor.run({"x": x})
    for value in found:
        value += 100
    assert x.tolist() == [[0, 1], [2, 3]]
    assert [v.ravel()[0] for v in found] == [100, 100, 100, 101, 101]
    assert executor.run({"x": x})[3].tolist() == [1, 1]


def test_a_value_is_freed_after_its_last_use(monkeypatch):
    """Between two operators, no more than the values still needed are alive."""
    alive, most = weakref.WeakSet(), []

    class Watched(np.ndarray):
        """An array that can be referred to weakly."""

    def exp(x):
        result = np.exp(np.asarray(x)).view(Watched)
        alive.add(WeakKey(result))
        most.append(len(alive))
        return result

    class WeakKey:
        """Lives as long as its array: stored in it."""

        def __init__(self, array):
            array.key = self

    operator = numpy_graph.find("Exp")
    monkeypatch.setattr(numpy_graph, "find", lambda _name: type(operator)(exp, "T", operator.dtypes))
    names = ["x", *(f"v{i}" for i in range(6)), "y"]
    executor = made([NODE("Exp", [a], [b]) for a, b in pairwise(names)])
    executor.run({"x": np.zeros((1, 2), np.float32)})
    assert max(most) == 2


RELU = NODE("Relu", ["h"], ["stacked"])


def looped(n=2, steps=3):
    rng = np.random.default_rng(n)
    return {"h0": rng.standard_normal(n).astype(np.float32), "x": rng.standard_normal((steps, n)).astype(np.float32)}


def test_scan_gives_what_onnx_runtime_gives():
    """Both refuse another length: the constant that tells the steps bounds the time."""
    ort, ours = executors(scan().SerializeToString())
    assert (ours.inputs, ours.outputs) == (ort.inputs, ort.outputs)
    for expected, found in zip(ort.run(looped()), ours.run(looped()), strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    for executor in executors(scan(3).SerializeToString()):
        with pytest.raises(TaskError, match=r"grad\.onnx"):
            executor.run(looped(steps=4))


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (scan(num_scan_inputs=3), "not one length"),
        (
            scan(around=body([NODE("Concat", ["h", "row"], ["next"], axis=0), RELU])),
            "form of a state",
        ),
        (scan(around=body([NODE("Relu", ["no"], ["next"]), RELU])), "uses 'no'"),
        (scan(around=body([NODE("Conv", ["h", "k"], ["next"]), RELU])), "operator 'Conv'"),
    ],
)
def test_false_scan_is_refused(model, message):
    with pytest.raises(TaskError, match=rf"^grad\.onnx can't be computed with numpy: .*{message}"):
        NumpyExecutor(Graph("grad", model.SerializeToString())).run(looped())


def test_outputs_of_all_steps_have_a_limit(monkeypatch):
    """Before memory is taken."""
    executor = NumpyExecutor(Graph("grad", scan(50).SerializeToString()))
    monkeypatch.setattr(numpy_graph, "MAX_LIVE_BYTES", 300)
    with pytest.raises(TaskError, match="Scan: the outputs of 50 steps take more than 300 bytes"):
        executor.run(looped(steps=50))


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ([NODE("Relu", ["y"], ["y"])], "uses 'y', which no earlier node makes"),
        ([NODE("Relu", ["b"], ["a"]), NODE("Relu", ["a"], ["b"])], "uses 'b', which no earlier node makes"),
        ([NODE("Relu", ["x"], ["x"])], "makes a value that exists already"),
        ([NODE("Relu", ["x"], ["c"])], "makes a value that exists already"),
        ([NODE("Split", ["x"], ["y", "y"], num_outputs=2)], "makes a value that exists already"),
        ([NODE("Relu", ["x"], ["z"])], "no node makes the output 'y'"),
        ([NODE("Conv", ["x", "c"], ["y"])], "does not have the operator 'Conv'"),
        ([NODE("Relu", ["x", "c"], ["y"])], "Relu does not take 2 inputs"),
    ],
)
def test_invalid_graph_is_refused(nodes, message):
    """A graph that is not valid is refused when it is loaded."""
    with pytest.raises(TaskError, match=rf"^score\.onnx can't be computed with numpy: .*{message}"):
        made(nodes, initializer=[constant("c", np.ones(2, np.float32))])


def test_nameless_output_is_dropped():
    """An output without a name is dropped and an input without one is absent; a node has as many outputs as results."""
    x, held = np.array([[1, 2], [3, 4]], np.float32), [constant("one", np.array([1])), constant("two", np.array([2]))]
    split = made([NODE("Split", ["x"], ["", "y"], num_outputs=2)])
    cut = made([NODE("Slice", ["x", "one", "two", "", "one"], ["y"])], initializer=held)
    assert split.run({"x": x})[0].tolist() == cut.run({"x": x})[0].tolist() == [[3, 4]]
    with pytest.raises(TaskError, match="Relu has 1 results, not 2"):
        made([NODE("Relu", ["x"], ["y", "z"])]).run({"x": x})


@pytest.mark.parametrize(
    "feed",
    [
        {},
        {"x": np.zeros((1, 2), np.float64)},
        {"x": np.zeros((1, 3), np.float32)},
        {"x": np.zeros(2, np.float32)},
        {"x": np.zeros((1, 2), np.float32), "z": np.zeros(1, np.float32)},
    ],
)
def test_unlike_inputs_are_refused(feed):
    """Other inputs than the graphs are refused."""
    with pytest.raises(TaskError, match=r"score\.onnx can't be computed with numpy: (the inputs are x|input 'x' is )"):
        made([NODE("Relu", ["x"], ["y"])]).run(feed)


def test_all_values_together_have_a_limit(monkeypatch):
    monkeypatch.setattr(numpy_graph, "MAX_LIVE_BYTES", 100)
    nodes = [NODE("Relu", ["x"], [f"v{i}"]) for i in range(5)]
    executor = made([*nodes, NODE("Max", [f"v{i}" for i in range(5)], ["y"])])
    executor.run({"x": np.zeros((2, 2), np.float32)})  # 16 bytes each, six of them
    with pytest.raises(TaskError, match="the graph's values take more than 100 bytes"):
        executor.run({"x": np.zeros((3, 2), np.float32)})


def test_memory_that_runs_out_is_task_error(monkeypatch):
    def full(_x):
        raise MemoryError

    operator = numpy_graph.find("Relu")
    monkeypatch.setattr(numpy_graph, "find", lambda _name: type(operator)(full, "T", operator.dtypes))
    with pytest.raises(TaskError, match="Relu needs more memory than there is"):
        made([NODE("Relu", ["x"], ["y"])]).run({"x": np.zeros((1, 2), np.float32)})


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 2])
def test_damaged_graph_is_a_task_error(place, monkeypatch):
    """Single bytes changed: no other exception leaves the executor, and no warning."""
    monkeypatch.setattr(arithmetic, "MAX_ELEMENTS", 1 << 16)
    feed = dict(zip("xy", samples(3), strict=True)) | {"theta": theta()}
    if place == 2:
        del feed["y"]
    model = logistic_models()[place].SerializeToString()
    rng, results = np.random.default_rng(place), 0
    for _ in range(400):
        damaged = bytearray(model)
        damaged[rng.integers(len(model))] ^= 1 << rng.integers(8)
        with suppress(TaskError):
            NumpyExecutor(Graph("score", bytes(damaged))).run(feed)
            results += 1
    assert 0 < results < 400


def test_operators_are_numpys():
    """No scalar leaves an operator: one of float64 would turn float32 arrays into float64 ones."""
    scalar = np.asarray(np.float32(2))
    for operator in (arithmetic.relu, arithmetic.sigmoid, arithmetic.reduce_sum, arithmetic.reduce_mean):
        assert isinstance(operator(scalar), np.ndarray)
        assert operator(scalar).dtype == np.float32
