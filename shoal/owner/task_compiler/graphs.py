"""Trace a torch module and a loss to one ONNX graph with every output, and cut the bundle's three graphs out of it.

Score, gradient and prediction share their forward pass, so the module is traced and lowered once; each graph of the
bundle then has the nodes that its outputs depend on. torch's exporter alone can't do this: torch.export refuses
torch.func.grad.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import onnx
import torch
import torch._dynamo  # torch._dynamo.source is not reachable otherwise
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from shoal.owner.task_compiler.decompositions import table
from shoal.owner.task_compiler.flat import FlatModel
from shoal.owner.task_compiler.recurrent import Lowered

OPSET: Final = 20
MAX_BATCH: Final = 1 << 20
"""Largest batch that the exported graphs accept."""

_DYNAMIC: Final = (frozenset[int](), frozenset({0}), frozenset({0}))
"""Dynamic dimensions of theta, x and y: the batch alone."""

_GRAPHS: Final = {
    "score": (("theta", "x", "y"), ("loss", "correct")),
    "grad": (("theta", "x", "y"), ("loss", "grad")),
    "predict": (("theta", "x"), ("outputs",)),
}


def trace(flat: FlatModel, inputs: Sequence[Tensor]) -> torch.fx.GraphModule:
    """Return the aten graph of :meth:`FlatModel.everything` with the backward pass written out, batch dynamic.

    Args:
        flat: the module and loss to trace.
        inputs: example theta, x, y.
    """
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    fakes = [
        mode.from_tensor(
            tensor,
            source=torch._dynamo.source.ConstantSource(f"input{i}"),
            symbolic_context=StatelessSymbolicContext(
                dynamic_sizes=[DimDynamic.DYNAMIC if j in dynamic else DimDynamic.STATIC for j in range(tensor.ndim)]
            ),
        )
        for i, (tensor, dynamic) in enumerate(zip(inputs, _DYNAMIC, strict=True))
    ]

    def function(theta: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:  # make_fx wants a plain function
        return flat.everything(theta, x, y)

    # A fused LSTM and fused attention have no decomposition.
    with torch.backends.mkldnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH), Lowered():
        return make_fx(function, tracing_mode="symbolic", decomposition_table=table())(*fakes)


def lower(graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> onnx.ModelProto:
    """Return the ONNX model of a traced graph, inputs theta, x, y, outputs loss, correct, grad, outputs."""
    batch = torch.export.Dim("B", min=1, max=MAX_BATCH)
    shapes = tuple(dict.fromkeys(dynamic, batch) for dynamic in _DYNAMIC)
    program = torch.export.export(graph, tuple(inputs), dynamic_shapes=shapes, strict=False)
    exported = torch.onnx.export(
        program,
        (),
        dynamo=True,
        opset_version=OPSET,
        input_names=["theta", "x", "y"],
        output_names=["loss", "correct", "grad", "outputs"],
        verbose=False,
        optimize=True,
    )
    assert exported is not None
    return exported.model_proto


def extract(whole: onnx.ModelProto, name: str) -> bytes:
    """Return the bytes of graph ``name`` (score, grad or predict): the nodes that its outputs need.

    Metadata is dropped: stack traces would leak paths of this machine, and long names waste bytes.
    """
    inputs, outputs = _GRAPHS[name]
    needed, nodes = set(outputs), []
    for node in reversed(whole.graph.node):
        if needed.isdisjoint(node.output):
            continue
        nodes.append(node)
        needed.update(node.input)
        needed.update(name for loop in _bodies(node) for inner in loop.node for name in inner.input)
    model = onnx.ModelProto(ir_version=min(whole.ir_version, 10), producer_name="shoal")
    model.opset_import.add(domain="", version=OPSET)
    model.graph.name = name
    for node in reversed(nodes):
        kept = model.graph.node.add(op_type=node.op_type)
        if node.domain:  # a custom domain is refused when the bundle is made
            kept.domain = node.domain
        kept.input.extend(node.input)
        used = max(i for i, output in enumerate(node.output) if output in needed)
        # Without unused optional outputs, such as a pool's indices; those of a loop are its body's.
        kept.output.extend(node.output if _bodies(node) else node.output[: used + 1])
        kept.attribute.extend(each for each in node.attribute if not each.name.endswith("_directions"))  # all forward
    for initializer in whole.graph.initializer:
        if initializer.name in needed:
            tensor = model.graph.initializer.add()
            tensor.CopyFrom(initializer)
            tensor.doc_string = ""
            del tensor.metadata_props[:]
    for target, source, wanted in (
        (model.graph.input, whole.graph.input, inputs),
        (model.graph.output, whole.graph.output, outputs),
    ):
        by_name = {value.name: value for value in source}
        for wanted_name in wanted:
            value = target.add(name=wanted_name)
            value.type.CopyFrom(by_name[wanted_name].type)
    _shorten(model, {*inputs, *outputs})
    body: bytes = model.SerializeToString(deterministic=True)
    return body


def _bodies(node: onnx.NodeProto) -> list[onnx.GraphProto]:
    """Return the body of a loop, or nothing."""
    return [attribute.g for attribute in node.attribute if attribute.HasField("g")]


def _shorten(model: onnx.ModelProto, keep: set[str]) -> None:
    """Rename every intermediate value to a short running name, and call the batch B everywhere."""
    names: dict[str, str] = {name: name for name in keep} | {"": ""}

    def short(name: Any) -> str:
        return names.setdefault(name, f"v{len(names):x}")

    def shorten(graph: onnx.GraphProto) -> None:
        del graph.value_info[:]
        for value in (*graph.input, *graph.output):
            value.name = short(value.name)
            for dimension in value.type.tensor_type.shape.dim:
                if dimension.dim_param:
                    dimension.dim_param = "B"
        for tensor in graph.initializer:
            tensor.name = short(tensor.name)
        for node in graph.node:
            for loop in _bodies(node):
                loop.name = "body"
                shorten(loop)
            node.ClearField("name")
            del node.metadata_props[:]
            node.input[:] = [short(name) for name in node.input]
            node.output[:] = [short(name) for name in node.output]

    shorten(model.graph)
