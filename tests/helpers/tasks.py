"""A small task made by hand with the onnx package, so that device tests need no torch."""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from shoal.task.bundle import LocalTraining, Parameter, TaskBundle, TaskManifest, TensorSpec

INPUTS, CLASSES = 4, 3
OPSET = 20


def graph(nodes, inputs, outputs, name="g", **extra):
    """Return ModelProto of a graph; inputs and outputs are (name, onnx dtype, shape)."""
    infos = [[helper.make_tensor_value_info(*info) for info in side] for side in (inputs, outputs)]
    body = helper.make_graph(nodes, name, infos[0], infos[1], **extra)
    return helper.make_model(body, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)


def constant(name, value):
    return numpy_helper.from_array(np.asarray(value), name)


def manifest(inputs=INPUTS, classes=CLASSES, segment="cluster", **changes):
    fields = {
        "name": "logistic",
        "opset": OPSET,
        "kind": "classification",
        "parameters": (Parameter("weight", (inputs, classes), segment), Parameter("bias", (classes,), "cluster")),
        "input": TensorSpec((inputs,), "float32"),
        "label": TensorSpec((), "int64", classes),
        "hyper": LocalTraining(),
        "score_digest": "0" * 64,
        "grad_digest": "0" * 64,
        "predict_digest": "0" * 64,
    }
    return TaskManifest(**(fields | changes))


def logistic_models(inputs=INPUTS, classes=CLASSES):
    """Return (score, grad, predict) ModelProtos of multinomial logistic regression, weight (inputs, classes) first.

    With p = softmax(x W + b) and one-hot labels h: d loss / d logits = (p - h) / n.
    """
    d = inputs * classes + classes
    theta = ("theta", TensorProto.FLOAT, [d])
    x, y = ("x", TensorProto.FLOAT, ["B", inputs]), ("y", TensorProto.INT64, ["B"])
    constants = [
        constant("sizes", np.array([inputs * classes, classes], np.int64)),
        constant("w_shape", np.array([inputs, classes], np.int64)),
    ]
    forward = [
        helper.make_node("Split", ["theta", "sizes"], ["w_flat", "b"], axis=0),
        helper.make_node("Reshape", ["w_flat", "w_shape"], ["w"]),
        helper.make_node("Gemm", ["x", "w", "b"], ["outputs"]),
    ]
    one_hot = [
        helper.make_node("LogSoftmax", ["outputs"], ["logp"], axis=-1),
        helper.make_node("OneHot", ["y", "depth", "levels"], ["hot"], axis=-1),
        helper.make_node("Mul", ["logp", "hot"], ["picked"]),
        helper.make_node("ReduceSum", ["picked", "last"], ["picked_rows"], keepdims=0),
        helper.make_node("ReduceMean", ["picked_rows"], ["mean_logp"], keepdims=0),
        helper.make_node("Neg", ["mean_logp"], ["loss"]),
    ]
    more = [
        constant("depth", np.array(classes, np.int64)),
        constant("levels", np.array([0, 1], np.float32)),
        constant("last", np.array([1], np.int64)),
    ]
    correct = [
        helper.make_node("ArgMax", ["outputs"], ["best"], axis=-1, keepdims=0),
        helper.make_node("Equal", ["best", "y"], ["right"]),
        helper.make_node("Cast", ["right"], ["right_int"], to=TensorProto.INT64),
        helper.make_node("ReduceSum", ["right_int"], ["correct"], keepdims=0),
    ]
    backward = [
        helper.make_node("Softmax", ["outputs"], ["p"], axis=-1),
        helper.make_node("Sub", ["p", "hot"], ["residual"]),
        helper.make_node("Shape", ["y"], ["count"]),
        helper.make_node("Cast", ["count"], ["count_float"], to=TensorProto.FLOAT),
        helper.make_node("Div", ["residual", "count_float"], ["d_logits"]),
        helper.make_node("Transpose", ["x"], ["x_t"], perm=[1, 0]),
        helper.make_node("MatMul", ["x_t", "d_logits"], ["d_w"]),
        helper.make_node("Reshape", ["d_w", "flat"], ["d_w_flat"]),
        helper.make_node("ReduceSum", ["d_logits", "first"], ["d_b"], keepdims=0),
        helper.make_node("Concat", ["d_w_flat", "d_b"], ["grad"], axis=0),
    ]
    flat = [constant("flat", np.array([-1], np.int64)), constant("first", np.array([0], np.int64))]
    loss, count = ("loss", TensorProto.FLOAT, []), ("correct", TensorProto.INT64, [])
    gradient, outputs = ("grad", TensorProto.FLOAT, [d]), ("outputs", TensorProto.FLOAT, ["B", classes])
    score = graph([*forward, *one_hot, *correct], [theta, x, y], [loss, count], initializer=constants + more)
    grad = graph([*forward, *one_hot, *backward], [theta, x, y], [loss, gradient], initializer=constants + more + flat)
    predict = graph(forward, [theta, x], [outputs], initializer=constants)
    for model in (score, grad, predict):
        onnx.checker.check_model(model)
    return score, grad, predict


def logistic_bundle(inputs=INPUTS, classes=CLASSES, segment="cluster", *, private=None, **changes):
    """Return a bundle of multinomial logistic regression made without torch.

    With ``private``, initial values (classes,), the bias is private.
    """
    models = (model.SerializeToString() for model in logistic_models(inputs, classes))
    if private is None:
        return TaskBundle.seal_digests(manifest(inputs, classes, segment, **changes), *models)
    layout = (Parameter("weight", (inputs, classes), segment), Parameter("bias", (classes,), "private"))
    values = np.asarray(private, "<f4").tobytes()
    return TaskBundle.seal_digests(manifest(inputs, classes, parameters=layout, **changes), *models, values)


def samples(n, inputs=INPUTS, classes=CLASSES, seed=0):
    """Return (x (n, inputs) float32, y (n,) int64)."""
    rng = np.random.default_rng(seed)
    return rng.standard_normal((n, inputs)).astype(np.float32), rng.integers(0, classes, n)
