"""Checks of ONNX bytes before a device passes them to ONNX Runtime."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

from shoal.errors import TaskError
from shoal.task import onnx_graph as onnx_wire
from shoal.task.onnx_graph import MAX_STEPS, check_graph, encode_bytes, encode_length, encode_varint
from tests.helpers.scans import body, scan
from tests.helpers.tasks import constant, graph, logistic_models


def small(nodes=None, **extra):
    nodes = nodes or [helper.make_node("Relu", ["x"], ["y"])]
    return graph(nodes, [("x", TensorProto.FLOAT, [2])], [("y", TensorProto.FLOAT, [2])], **extra)


def test_ordinary_graphs_pass():
    """Ordinary graphs pass and name their opset, and so does a scan of known length."""
    for model in (*logistic_models(), scan(MAX_STEPS)):
        assert check_graph(model.SerializeToString(), "g") == 20


@pytest.mark.parametrize("version", [0, 17, 24, 1 << 40])
def test_an_unsupported_opset_is_refused(version):
    model = small()
    model.opset_import[0].version = version
    with pytest.raises(TaskError, match="operator set"):
        check_graph(model.SerializeToString(), "g")


NESTED = body(extra=[helper.make_node("Scan", ["h", "row"], ["a", "b"], body=body(), num_scan_inputs=1)])
LONG = constant("ticks", np.zeros((MAX_STEPS + 1, 0), np.float32))


EXTERNAL = TensorProto(name="t", data_type=1, dims=[2], data_location=TensorProto.EXTERNAL)
NAMED_FILE = TensorProto(name="t", data_type=1, dims=[2])
NAMED_FILE.external_data.add(key="location", value="/etc/passwd")
CUSTOM = helper.make_node("Relu", ["h"], ["z"], domain="com.microsoft")


def changed(change):
    model = small()
    change(model)
    return model


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (small([CUSTOM]), "operator domain"),
        (scan(around=body(extra=[CUSTOM])), "operator domain"),
        (changed(lambda model: model.opset_import.add(domain="evil", version=1)), "operator domain"),
        (changed(lambda model: model.functions.add(name="f", domain="d")), "local functions"),
        (changed(lambda model: model.metadata_props.add(key="ort_config", value="{}")), "may not use"),
        (changed(lambda model: model.graph.sparse_initializer.add()), "may not use"),
        (changed(lambda model: model.training_info.add()), "may not use"),
        (small([helper.make_node("Loop", ["x"], ["y"], body=small().graph)]), "control flow"),
        (small(initializer=[EXTERNAL]), "another file"),
        (small(initializer=[NAMED_FILE]), "another file"),
        (small([helper.make_node("Constant", [], ["y"], value=EXTERNAL)]), "another file"),
        (scan(MAX_STEPS + 1), "constant input that tells its steps"),
        (scan(0), "constant input that tells its steps"),
        (scan(num_scan_inputs=0), "constant input that tells its steps"),
        (scan(num_scan_inputs=-1), "constant input that tells its steps"),
        (scan(ticks=constant("other", np.zeros((3, 0), np.float32))), "constant input that tells its steps"),
        (scan(scan_input_axes=[1, 1]), "control flow"),
        (scan(scan_input_directions=[1, 0]), "control flow"),
        (scan(around=NESTED), "control flow"),
        (scan(other=body()), "control flow"),
        (scan(num_scan_inputs=body()), "control flow"),
    ],
    ids=[
        *("a node's domain", "a domain in a scan's body", "an opset", "a function", "metadata", "sparse", "training"),
        *("a loop", "external data by its flag", "external data by its file", "an external attribute"),
        *(
            "long scan",
            "scan of 0",
            "no scan inputs",
            "negative inputs",
            "scan of another constant",
            "axes",
            "directions",
        ),
        *("a scan in a scan", "two bodies", "a graph for a number"),
    ],
)
def test_forbidden_graph_is_refused(model, message):
    """Also a scan of unknown time. Either sign of external data is enough."""
    with pytest.raises(TaskError, match=message):
        check_graph(model.SerializeToString(), "g")


def test_longer_of_two_constants_counts():
    """Of two constants or attributes with one name an executor may take either."""
    model = scan(3)
    model.graph.initializer.insert(0, LONG)
    with pytest.raises(TaskError, match="tells its steps"):
        check_graph(model.SerializeToString(), "g")
    model = scan(3)
    model.graph.node[0].attribute.append(helper.make_attribute("num_scan_inputs", 1))
    with pytest.raises(TaskError, match="control flow"):
        check_graph(model.SerializeToString(), "g")


def test_two_graphs_in_one_attribute():
    """Protobuf would merge them."""
    inner = body().SerializeToString()
    attribute = encode_bytes(6, inner) + encode_bytes(6, inner)
    node = encode_bytes(1, encode_bytes(5, attribute))
    with pytest.raises(TaskError, match="two graphs"):
        check_graph(encode_bytes(7, node) + encode_bytes(8, b"\x10\x14"), "g")


def test_oversize_is_refused_unread(monkeypatch):
    """Oversize is refused before it is read. Protobuf would merge two graphs, so that a check of either alone says nothing."""
    data = small().SerializeToString()
    with pytest.raises(TaskError, match="exactly one graph"):
        check_graph(data + encode_bytes(7, b""), "g")
    monkeypatch.setattr(onnx_wire, "MAX_GRAPH_BYTES", 10)
    with pytest.raises(TaskError, match="more than the limit of 10"):
        check_graph(data, "g")


def test_every_truncation_is_refused():
    data = small().SerializeToString()
    for end in range(len(data)):
        with pytest.raises(TaskError):
            check_graph(data[:end], "g")


@pytest.mark.slow
def test_damage_raises_only_task_errors():
    """4000 random edits of a real graph: each is accepted or refused, nothing else happens."""
    rng = np.random.default_rng(5)
    data = np.frombuffer(logistic_models()[1].SerializeToString(), np.uint8)
    refused = 0
    for _ in range(4000):
        damaged = data.copy()
        damaged[rng.integers(0, len(data), rng.integers(1, 4))] = rng.integers(0, 256)
        try:
            check_graph(damaged.tobytes(), "g")
        except TaskError:
            refused += 1
    assert refused > 400


def test_many_tiny_fields_hit_the_budget(monkeypatch):
    """As many as a graph may have take about two seconds, so fewer do here."""
    monkeypatch.setattr(onnx_wire, "MAX_FIELDS", 1000)
    bomb = encode_bytes(8, b"\x10\x14") + encode_bytes(7, b"\x10\x00" * 1000)  # field 2 of a graph, over and over
    with pytest.raises(TaskError, match="more than 1000 protobuf fields"):
        check_graph(bomb, "g")


@pytest.mark.parametrize(
    "data",
    [b"\xff" * 11, b"\x3b\x00", b"\x3c", b"\x00\x00", b"\x3a\xff\xff\xff\xff\x0f", b"\x3d\x00\x00", b"\x39\x00"],
    ids=["long varint", "group", "end group", "field 0", "length past end", "short fixed32", "short fixed64"],
)
def test_malformed_protobuf_is_refused(data):
    with pytest.raises(TaskError, match="not valid protobuf"):
        check_graph(data, "g")


def test_varints_agree_with_protobuf():
    for value in (0, 1, 127, 128, 300, 1 << 20, (1 << 63) - 1):
        tensor = TensorProto(dims=[value])
        packed = encode_length(1, len(encode_varint(value))) + encode_varint(value)
        assert tensor.SerializeToString() in (packed, encode_varint(8) + encode_varint(value))


def test_bound_input_becomes_an_initializer():
    predict = logistic_models()[2].SerializeToString()
    values = np.arange(15, dtype="<f4")
    model = onnx.load_from_string(onnx_wire.bind_input(predict, "theta", 15) + values.tobytes())
    assert [i.name for i in model.graph.input] == ["x"]
    bound = next(i for i in model.graph.initializer if i.name == "theta")
    np.testing.assert_array_equal(onnx.numpy_helper.to_array(bound), values)
    with pytest.raises(TaskError, match="no input 'nothing'"):
        onnx_wire.bind_input(predict, "nothing", 15)
    with pytest.raises(TaskError, match="no input 'nothing'"):
        onnx_wire.standardise_input(predict, "nothing", (0.0,), (1.0,), (1,), largest=1.0)
