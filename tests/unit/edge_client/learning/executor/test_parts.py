"""A gradient graph that takes theta and returns the gradient in parts."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto
from onnx.helper import make_node as node

from edge_client.learning.executor import onnx_runtime
from edge_client.learning.executor.base import Graph
from edge_client.learning.executor.onnx_runtime import OrtExecutor
from edge_client.learning.executor.parts import cut
from tests.helpers.tasks import constant, graph, logistic_models, samples

D = 6
THETA = ("theta", TensorProto.FLOAT, [D])
GRAD = ("grad", TensorProto.FLOAT, [D])
SIZES = constant("sizes", np.array([4, 2], np.int64))
SHAPES = [
    constant("matrix", np.array([2, 2], np.int64)),
    constant("flat4", np.array([4], np.int64)),
    constant("flat2", np.array([2], np.int64)),
]
SPLIT = node("Split", ["theta", "sizes"], ["a_flat", "b"], axis=0)
RESHAPE = node("Reshape", ["a_flat", "matrix"], ["a"])
SQUARE = node("Mul", ["a", "a"], ["a_grad"])
FLAT = node("Reshape", ["a_grad", "flat4"], ["a_part"])
DOUBLE = node("Add", ["b", "b"], ["b_part"])
CONCAT = node("Concat", ["a_part", "b_part"], ["grad"], axis=0)
CHAIN = (SPLIT, RESHAPE, SQUARE, FLAT, DOUBLE, CONCAT)


def model(*nodes, outputs=(GRAD,)):
    return graph(list(nodes), [THETA], list(outputs), initializer=[SIZES, *SHAPES]).SerializeToString()


def both(model_bytes, monkeypatch, feed):
    """Run the graph as it is and with cut vectors; return the outputs of both, and whether it was cut."""
    whole_or_cut = OrtExecutor(Graph("grad", model_bytes))
    with monkeypatch.context() as patch:
        patch.setattr(onnx_runtime, "cut", lambda *_: None)
        whole = OrtExecutor(Graph("grad", model_bytes))
    assert (whole_or_cut.inputs, whole_or_cut.outputs) == (whole.inputs, whole.outputs)
    return whole_or_cut.run(feed), whole.run(feed)


def test_nodes_that_copy_vectors_are_gone():
    found = cut(model(*CHAIN), "grad.onnx")
    assert [(part.name, part.start, part.stop, part.shape) for part in found.inputs] == [
        ("a", 0, 4, (2, 2)),
        ("b", 4, 6, (2,)),
    ]
    assert [(part.name, part.start, part.stop) for part in found.outputs] == [("a_grad", 0, 4), ("b_part", 4, 6)]
    edited = onnx.load_from_string(found.model)
    assert [each.op_type for each in edited.graph.node] == ["Mul", "Add"]
    assert [each.name for each in edited.graph.input] == ["a", "b"]
    assert [each.name for each in edited.graph.output] == ["a_grad", "b_part"]
    assert found.length == D
    assert found.whole_outputs == ("grad",)


def test_model_is_read_from_its_own_memory():
    """Another model is read from its own memory."""
    executor = OrtExecutor(Graph("grad", model(*CHAIN)))
    first, second = np.arange(D, dtype=np.float32), np.ones(D, np.float32)
    executor.run({"theta": first})
    np.testing.assert_array_equal(executor.run({"theta": second})[0], [1, 1, 1, 1, 2, 2])
    second += 1
    np.testing.assert_array_equal(executor.run({"theta": second})[0], [4, 4, 4, 4, 4, 4])


@pytest.mark.parametrize(
    "theta",
    [np.zeros(D - 1, np.float32), np.zeros(D), np.zeros(2 * D, np.float32)[::2], np.zeros((D, 1), np.float32)],
    ids=["short", "float64", "strided", "matrix"],
)
def test_unfit_memory_is_refused(theta):
    """Memory that is no vector of that length is refused."""
    executor = OrtExecutor(Graph("grad", model(*CHAIN)))
    with pytest.raises(onnx_runtime.TaskError, match="not a contiguous vector of 6 float32 coordinates"):
        executor.run({"theta": theta})


def test_equal_gradients_stay_two(monkeypatch):
    """Equal gradients of two tensors stay two."""
    split = node("Split", ["theta", "sizes"], ["p", "q"], axis=0)
    halves = constant("sizes", np.array([3, 3], np.int64))
    shape = constant("flat", np.array([3], np.int64))
    nodes = [
        split,
        node("Add", ["p", "q"], ["sum"]),
        node("Reshape", ["sum", "flat"], ["p_grad"]),
        node("Reshape", ["sum", "flat"], ["q_grad"]),
        node("Concat", ["p_grad", "q_grad"], ["grad"], axis=0),
    ]
    made = graph(nodes, [THETA], [GRAD], initializer=[halves, shape]).SerializeToString()
    assert [part.name for part in cut(made, "grad.onnx").outputs] == ["p_grad", "q_grad"]
    (parts,), (whole,) = both(made, monkeypatch, {"theta": np.arange(D, dtype=np.float32)})
    np.testing.assert_array_equal(parts, [3, 5, 7, 3, 5, 7])
    np.testing.assert_array_equal(parts, whole)


@pytest.mark.parametrize(
    "nodes",
    [
        (*CHAIN[:-1], node("Concat", ["b_part", "a_part"], ["grad"], axis=0)),
        (SPLIT, node("Concat", ["a_flat", "b"], ["grad"], axis=0)),
        (
            SPLIT,
            node("Add", ["b", "b"], ["c"]),
            node("Concat", ["a_flat", "c"], ["grad"], axis=0),
        ),
        (*CHAIN[:-1], node("Concat", ["a_part", "b"], ["grad"], axis=0)),
        (
            *CHAIN[:-1],
            node("Concat", ["a_part", "b_part"], ["c"], axis=0),
            node("Neg", ["c"], ["grad"]),
        ),
        (
            *CHAIN[:-1],
            node("Sum", ["a_part", "a_part"], ["c"]),
            node("Concat", ["c", "b_part"], ["grad"], axis=0),
        ),
        (node("Neg", ["theta"], ["grad"]),),
        (
            *CHAIN[:-1],
            node("Concat", ["a_part", "b_part"], ["c"], axis=0),
            node("Add", ["c", "theta"], ["grad"]),
        ),
    ],
    ids=["order", "parts of theta", "a part of theta", "a tensor of theta", "negated", "sum", "whole", "theta again"],
)
def test_other_forms_give_the_same_gradient(nodes, monkeypatch):
    theta = np.arange(1, D + 1, dtype=np.float32)
    (found,), (whole,) = both(model(*nodes), monkeypatch, {"theta": theta})
    np.testing.assert_array_equal(found, whole)


def test_varying_gradient_is_not_in_place(monkeypatch):
    """A gradient whose size depends on the input is not written in place."""
    x = ("x", TensorProto.FLOAT, ["B"])
    nodes = [
        *CHAIN[:-1],
        node("Identity", ["x"], ["c"]),
        node("Concat", ["c", "b_part"], ["grad"], axis=0),
    ]
    made = graph(nodes, [THETA, x], [GRAD], initializer=[SIZES, *SHAPES]).SerializeToString()
    found, whole = both(made, monkeypatch, {"theta": np.ones(D, np.float32), "x": np.ones(4, np.float32)})
    np.testing.assert_array_equal(found[0], whole[0])


def test_cut_graphs_have_the_same_bits(monkeypatch):
    """Training graphs are cut and have the bits of the whole."""
    x, y = samples(5)
    made = logistic_models()[1].SerializeToString()
    assert len(cut(made, "grad.onnx").inputs) == 2
    theta = np.linspace(-1, 1, 15, dtype=np.float32)
    found, whole = both(made, monkeypatch, {"theta": theta, "x": x, "y": y})
    np.testing.assert_array_equal(found[1], whole[1])
    assert float(found[0]) == float(whole[0])
