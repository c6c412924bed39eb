"""Graphs with a Scan, the loop over a sequence."""

from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from tests.helpers.tasks import constant, graph

FLOAT = TensorProto.FLOAT
ROW = ["n"]


def body(nodes=(), extra=()):
    """Return a body of a state h and a row: h + k row is the next state, and what is stacked; k comes from around it."""
    nodes = nodes or (
        helper.make_node("Mul", ["row", "k"], ["scaled"]),
        helper.make_node("Add", ["h", "scaled"], ["next"]),
        helper.make_node("Identity", ["next"], ["stacked"]),
    )
    inputs = [
        helper.make_tensor_value_info(name, FLOAT, shape) for name, shape in (("h", ROW), ("row", ROW), ("tick", [0]))
    ]
    outputs = [helper.make_tensor_value_info(name, FLOAT, ROW) for name in ("next", "stacked")]
    return helper.make_graph([*nodes, *extra], "body", inputs, outputs)


def scan(steps=3, *, around=None, ticks=None, rows="x", **attributes):
    """Return a model that sums x (steps, n) row by row, times k, from h0 (n,): h (n,) and all sums (steps, n).

    Args:
        steps: that the constant of the Scan tells.
        around: the body.
        ticks: that constant, in another form.
        rows: the name of what is scanned.
        attributes: of the Scan, besides the usual ones or in place of them.
    """
    usual = {"body": around or body(), "num_scan_inputs": 2}
    node = helper.make_node("Scan", ["h0", rows, "ticks"], ["h", "all"], **(usual | attributes))
    constants = [
        constant("ticks", np.zeros((steps, 0), np.float32)) if ticks is None else ticks,
        constant("k", np.float32(2)),
    ]
    inputs, outputs = [("h0", FLOAT, ROW), ("x", FLOAT, ["t", "n"])], [("h", FLOAT, ROW), ("all", FLOAT, ["t", "n"])]
    return graph([node], inputs, outputs, initializer=constants)
