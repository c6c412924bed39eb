"""One traced graph with every output, and the three graphs that are cut out of it."""

from __future__ import annotations

import copy

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper
from torch import nn

from edge_client.learning.model import OrtModel
from shoal.owner.task_compiler.builtin import cross_entropy
from shoal.owner.task_compiler.compile import quiet
from shoal.owner.task_compiler.flat import FlatModel, flatten
from shoal.owner.task_compiler.graphs import OPSET, extract, trace
from shoal.task.bundle import TaskBundle
from shoal.task.manifest import Parameter
from tests.helpers.tasks import CLASSES, INPUTS, graph, logistic_bundle, logistic_models, manifest, samples

pytestmark = pytest.mark.torch
OUTPUTS = ("loss", "correct", "grad", "outputs")


def whole(nodes=(), **changes):
    """Return one graph of logistic regression with all four outputs, as `lower` returns it; ``nodes`` are added."""
    parts = logistic_models()
    by_output = {node.output[0]: node for part in parts for node in part.graph.node}
    named = {value.name: value for part in parts for value in (*part.graph.input, *part.graph.output)}
    order = [n.output[0] for n in parts[0].graph.node]
    order += [n.output[0] for n in parts[1].graph.node if n.output[0] not in order]
    made = graph([*(by_output[name] for name in order), *nodes], [], [])
    made.graph.input.extend(copy.deepcopy(named[name]) for name in ("theta", "x", "y"))
    made.graph.output.extend(copy.deepcopy(named[name]) for name in OUTPUTS)
    made.graph.initializer.extend({t.name: t for part in parts for t in part.graph.initializer}.values())
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def cut(name, model=None):
    return onnx.load_from_string(extract(model or whole(), name))


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("score", ["theta", "x", "y"], ["loss", "correct"]),
        ("grad", ["theta", "x", "y"], ["loss", "grad"]),
        ("predict", ["theta", "x"], ["outputs"]),
    ],
)
def test_graphs_have_their_own_nodes(name, inputs, outputs):
    """Each graph has its own inputs outputs and nodes."""
    model = cut(name)
    onnx.checker.check_model(model, full_check=True)
    assert [v.name for v in model.graph.input] == inputs
    assert [v.name for v in model.graph.output] == outputs
    expected = logistic_models()[("score", "grad", "predict").index(name)]
    assert sorted(n.op_type for n in model.graph.node) == sorted(n.op_type for n in expected.graph.node)
    assert len(model.graph.initializer) == len(expected.graph.initializer)
    assert (model.graph.name, model.opset_import[0].version) == (name, OPSET)


def test_three_graphs_give_the_whole():
    """The three graphs compute what the whole does."""
    bundle = TaskBundle.seal_digests(manifest(), *(extract(whole(), name) for name in ("score", "grad", "predict")))
    x, y = samples(9)
    theta = np.random.default_rng(3).standard_normal(bundle.length).astype(np.float32)
    ours, expected = OrtModel(bundle), OrtModel(logistic_bundle())
    assert ours.score(theta, x, y) == expected.score(theta, x, y)
    assert ours.grad(theta, x, y)[0] == expected.grad(theta, x, y)[0]
    np.testing.assert_array_equal(ours.grad(theta, x, y)[1], expected.grad(theta, x, y)[1])
    np.testing.assert_array_equal(ours.predict(theta, x), expected.predict(theta, x))


def test_nothing_of_this_machine_is_in_bytes():
    """The exporter writes stack traces with paths into nodes and tensors."""
    model = whole(doc_string="/home/me/model.py", producer_name="me", domain="home")
    model.graph.doc_string = "/home/me/model.py"
    for part in (*model.graph.node, *model.graph.initializer):
        part.doc_string = "/home/me/model.py"
        part.metadata_props.add(key="pkg.torch.onnx.stack_trace", value="/home/me/model.py")
    for node in model.graph.node:
        node.name = "/home/me/layer"
    assert extract(model, "grad") == extract(whole(), "grad")
    assert b"home" not in extract(model, "grad")


def test_names_are_short_and_batch_is_b():
    """Inner values get short names and the batch is called b."""
    model = whole()
    for value in (*model.graph.input, *model.graph.output):
        for dimension in value.type.tensor_type.shape.dim:
            if dimension.dim_param:
                dimension.dim_param = "s77"
    made = cut("score", model)
    inner = {name for node in made.graph.node for name in node.output} - {"loss", "correct"}
    assert all(len(name) <= 3 for name in inner)
    assert {d.dim_param for v in made.graph.input for d in v.type.tensor_type.shape.dim} - {""} == {"B"}
    assert extract(model, "score") == extract(whole(), "score")


def test_unread_output_is_dropped():
    """ONNX Runtime computes a pool's indices if the node names them."""
    nodes = [
        helper.make_node("Unsqueeze", ["x", "last"], ["channels"]),
        helper.make_node("MaxPool", ["channels"], ["pooled", "indices"], kernel_shape=[1]),
    ]
    value = [helper.make_tensor_value_info("outputs", TensorProto.FLOAT, ["B", 1, INPUTS])]
    model = whole(nodes)
    del model.graph.output[3]
    model.graph.output.extend(value)
    for node in model.graph.node:
        node.output[:] = [{"outputs": "logits", "pooled": "outputs"}.get(name, name) for name in node.output]
        node.input[:] = [{"outputs": "logits"}.get(name, name) for name in node.input]
    (pool,) = [n for n in cut("predict", model).graph.node if n.op_type == "MaxPool"]
    assert list(pool.output) == ["outputs"]


def test_newer_format_is_written_older():
    """As one that devices read. A custom domain stays visible, so that the bundle refuses it."""
    assert cut("predict", whole(ir_version=13)).ir_version == 10
    assert cut("predict", whole(ir_version=9)).ir_version == 9
    model = whole()
    model.graph.node[2].domain = "com.example"
    assert "com.example" in {node.domain for node in cut("predict", model).graph.node}


@pytest.mark.slow
def test_traced_graph_fits_any_batch():
    """Among them one, which torch would otherwise take for a constant."""
    torch.manual_seed(0)
    model = nn.Linear(INPUTS, CLASSES)
    layout = (Parameter("weight", (CLASSES, INPUTS), "cluster"), Parameter("bias", (CLASSES,), "cluster"))
    flat, theta = FlatModel(model, cross_entropy, layout, counts=True), flatten(model, layout)
    with quiet():
        traced = trace(flat, (theta, torch.randn(5, INPUTS), torch.randint(0, CLASSES, (5,))))
    for n in (1, 2, 5, 40):
        x, y = torch.randn(n, INPUTS), torch.randint(0, CLASSES, (n,))
        for found, expected in zip(traced(theta, x, y), flat.everything(theta, x, y), strict=True):
            torch.testing.assert_close(found, expected)
