"""Nodes, constants and types of a graph, against the onnx package; bytes that are damaged or not supported."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper, numpy_helper

from shoal.errors import TaskError
from shoal.task import onnx_graph
from shoal.task.onnx_contents import TensorType, read_graph
from tests.helpers.scans import scan
from tests.helpers.tasks import graph, logistic_models

FLOAT = TensorProto.FLOAT
RELU = helper.make_node("Relu", ["x"], ["y"])
TYPES = {"float32": FLOAT, "int32": TensorProto.INT32, "int64": TensorProto.INT64, "bool": TensorProto.BOOL}


def model(nodes=(RELU,), tensors=(), inputs=(("x", FLOAT, ["n", 2]),)):
    return graph(list(nodes), inputs, [("y", FLOAT, ["n", 2])], initializer=list(tensors))


def read(made):
    return read_graph(made.SerializeToString(), "g.onnx")


def constant_of(tensor):
    return read(model(tensors=[tensor])).constants["c"]


@pytest.mark.parametrize("place", [0, 1, 2])
def test_graph_is_what_onnx_reads(place):
    """A tasks graph is what the onnx package reads."""
    made = logistic_models()[place]
    found = read(made)
    assert [(n.operator, n.inputs, n.outputs) for n in found.nodes] == [
        (n.op_type, tuple(n.input), tuple(n.output)) for n in made.graph.node
    ]
    for node, expected in zip(found.nodes, made.graph.node, strict=True):
        attributes = {a.name: helper.get_attribute_value(a) for a in expected.attribute}
        assert node.attributes == {n: tuple(v) if isinstance(v, list) else v for n, v in attributes.items()}
    assert list(found.constants) == [t.name for t in made.graph.initializer]
    for tensor in made.graph.initializer:
        expected = numpy_helper.to_array(tensor)
        assert found.constants[tensor.name].dtype == expected.dtype
        np.testing.assert_array_equal(found.constants[tensor.name], expected, strict=True)
    assert found.inputs[0] == TensorType("theta", "float32", (15,))
    assert found.inputs[1] == TensorType("x", "float32", (None, 4))
    assert [o.name for o in found.outputs] == [o.name for o in made.graph.output]


@pytest.mark.parametrize("raw", [True, False])
@pytest.mark.parametrize("dtype", TYPES)
@settings(max_examples=10)
@given(shape=st.lists(st.integers(0, 3), max_size=3), seed=st.integers(0, 99))
def test_constants_are_read_in_both_forms(dtype, raw, shape, seed):
    """Constants are read from raw bytes and from numbers."""
    values = np.random.default_rng(seed).integers(-(2**31), 2**31, shape).astype(dtype)
    data = values.tobytes() if raw else values.ravel().tolist()
    found = constant_of(helper.make_tensor("c", TYPES[dtype], shape, data, raw=raw))
    np.testing.assert_array_equal(found, values, strict=True)
    assert not found.flags.writeable


def test_attributes_of_every_kind():
    node = helper.make_node(
        "X",
        ["x"],
        ["y"],
        i=-3,
        zero=0,
        f=0.5,
        none=0.0,
        s="add",
        e="",
        ints=[1, -2],
        t=numpy_helper.from_array(np.ones(2)),
    )
    with pytest.raises(TaskError, match="element type 11 is not supported"):
        read(model([node]))
    next(a for a in node.attribute if a.name == "t").t.CopyFrom(numpy_helper.from_array(np.ones(2, np.float32)))
    found = dict(read(model([node])).nodes[0].attributes)
    assert found.pop("t").tolist() == [1, 1]
    assert found == {"i": -3, "zero": 0, "f": 0.5, "none": 0.0, "s": "add", "e": "", "ints": (1, -2)}


def tensor(**fields):
    return TensorProto(name="c", **fields)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (tensor(data_type=1, dims=[3], raw_data=b"1234"), r"shape \(3,\) has 1 elements"),
        (tensor(data_type=1, dims=[-1], raw_data=b"1234"), r"shape \(-1,\) has 1 elements"),
        (tensor(data_type=1, dims=[1 << 40, 1 << 40], raw_data=b"1234"), "has 1 elements"),
        (tensor(data_type=1, dims=[1], raw_data=b"12345"), "5 bytes are no whole number of float32 elements"),
        (tensor(data_type=9, dims=[1], raw_data=b"\x02"), "a bool is neither 0 nor 1"),
        (tensor(data_type=1, dims=[1], int64_data=[1]), "float32 has elements of another type"),
        (tensor(data_type=1, dims=[1], raw_data=b"1234", float_data=[1]), "float32 has elements of another type"),
        (tensor(data_type=11, dims=[1], double_data=[1]), "element type 11 is not supported"),
        (tensor(dims=[]), "element type 0 is not supported"),
        (tensor(data_type=1, dims=[1] * 100, raw_data=b"1234"), "maximum supported dimension"),
    ],
)
def test_false_tensor_is_refused(bad, message):
    """A tensor that is not what it says is refused."""
    with pytest.raises(TaskError, match=rf"^g\.onnx is not a graph that this device can read: .*{message}"):
        constant_of(bad)


def test_names_that_stand_twice_are_refused():
    with pytest.raises(TaskError, match="two constants are named 'c'"):
        read(model(tensors=[constant(), constant()]))
    node = helper.make_node("Relu", ["x"], ["y"], a=1)
    node.attribute.append(node.attribute[0])
    with pytest.raises(TaskError, match="two attributes 'a'"):
        read(model([node]))


def constant():
    return numpy_helper.from_array(np.ones(2, np.float32), "c")


def test_unreadable_attribute_is_refused():
    """An attribute without a value that can be read is refused."""
    node = helper.make_node("Relu", ["x"], ["y"], a=1)
    node.attribute[0].type = 8
    with pytest.raises(TaskError, match="attribute 'a' has type 8"):
        read(model([node]))
    node.attribute[0].type = 4
    with pytest.raises(TaskError, match="tensor is missing"):
        read(model([node]))


def test_other_inputs_are_refused():
    """Inputs that are no tensors are refused; one with a constant of its name is none."""
    tensor = numpy_helper.from_array(np.ones(2, np.float32), "c")
    inputs = (("x", FLOAT, ["n", 2]), ("c", FLOAT, [2]))
    assert [i.name for i in read(model(tensors=[tensor], inputs=inputs)).inputs] == ["x"]
    made = model()
    made.graph.input[0].type.sequence_type.elem_type.tensor_type.elem_type = FLOAT
    with pytest.raises(TaskError, match="an input or output is no tensor"):
        read(made)
    made.graph.input[0].ClearField("type")
    with pytest.raises(TaskError, match="element type 0"):
        read(made)
    made.opset_import.add(domain="evil", version=1)
    with pytest.raises(TaskError, match="operator domain"):
        read(made)
    with pytest.raises(TaskError, match="can't decode"):
        read_graph(model().SerializeToString().replace(b"Relu", b"Re\xff\xfe"), "g.onnx")


def test_packed_numbers_count(monkeypatch):
    """A list of a million numbers takes as long as a million fields, and is one field."""
    wide = helper.make_tensor("c", TensorProto.INT64, [300], [0] * 300)
    assert len(constant_of(wide)) == 300
    monkeypatch.setattr(onnx_graph, "MAX_FIELDS", 200)
    with pytest.raises(TaskError, match="more than 200 protobuf fields"):
        constant_of(wide)


def test_body_of_a_scan_is_read():
    """With the values around it that it uses."""
    (node,) = read(scan()).nodes
    assert [n.operator for n in node.attributes["body"].nodes] == ["Mul", "Add", "Identity"]
    assert (node.captured, node.reads) == (("k",), ("h0", "x", "ticks", "k"))
