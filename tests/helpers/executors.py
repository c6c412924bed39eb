"""Single operators as graphs, and the comparison of numpy's executor with ONNX Runtime on them."""

from __future__ import annotations

import numpy as np
from onnx import helper, numpy_helper

from edge_client.learning.executor.base import Graph
from edge_client.learning.executor.numpy_graph import NumpyExecutor
from edge_client.learning.executor.onnx_runtime import OrtExecutor
from tests.helpers.tasks import graph

RTOL, ATOL = 1e-5, 1e-6


def onnx_type(value):
    return helper.np_dtype_to_tensor_dtype(np.asarray(value).dtype)


def single(operator, inputs, outputs=1, out_type=None, **attributes):
    """Return the bytes of a graph of one node.

    Args:
        operator: its name.
        inputs: arrays; None for an absent one.
        outputs: number of outputs.
        out_type: ONNX's element type of the outputs; that of the first input if None.
        attributes: the node's.
    """
    names = ["" if value is None else f"i{place}" for place, value in enumerate(inputs)]
    given = [(f"i{place}", onnx_type(v), list(v.shape)) for place, v in enumerate(inputs) if v is not None]
    made = [f"o{place}" for place in range(outputs)]
    node = helper.make_node(operator, names, made, **attributes)
    types = [(name, out_type or given[0][1], None) for name in made]
    return graph([node], given, types).SerializeToString()


def feed(inputs):
    return {f"i{place}": value for place, value in enumerate(inputs) if value is not None}


def executors(model):
    return OrtExecutor(Graph("grad", model)), NumpyExecutor(Graph("grad", model))


def agree(operator, *inputs, outputs=1, out_type=None, **attributes):
    """Check that numpy and ONNX Runtime give the same shapes, dtypes and values; return numpy's outputs."""
    arrays = [None if value is None else np.asarray(value) for value in inputs]
    model = single(operator, arrays, outputs, out_type, **attributes)
    expected, found = (each.run(feed(arrays)) for each in executors(model))
    assert len(expected) == len(found) == outputs
    for a, b in zip(expected, found, strict=True):
        assert (b.shape, b.dtype) == (a.shape, a.dtype)
        np.testing.assert_allclose(b, a, rtol=RTOL, atol=ATOL if a.dtype.kind == "f" else 0)
        assert b.flags.writeable
        assert b.flags.c_contiguous
        assert not any(np.shares_memory(b, value) for value in arrays if value is not None)
    return found


def numpy_run(operator, *inputs, outputs=1, out_type=None, **attributes):
    """Run one operator in numpy alone, for inputs that ONNX Runtime need not have; an array or None each."""
    arrays = [None if value is None else np.asarray(value) for value in inputs]
    model = single(operator, arrays, outputs, out_type, **attributes)
    return NumpyExecutor(Graph("grad", model)).run(feed(arrays))


def tensor(value):
    """Return an attribute's tensor."""
    return numpy_helper.from_array(np.asarray(value))
