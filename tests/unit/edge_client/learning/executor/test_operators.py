"""The table of numpy's operators: inputs, dtypes and attributes that are refused."""

import numpy as np
import pytest
from onnx import TensorProto, defs

from edge_client.learning.executor.operators import _FIXED, ANY, OPERATORS, find
from shoal.errors import TaskError
from shoal.task.onnx_contents import Node
from tests.helpers.executors import numpy_run, tensor

FLOATS, LONGS = np.ones((2, 2), np.float32), np.ones((2, 2), np.int64)


@pytest.mark.parametrize("name", ["Conv", "ConvTranspose", "MaxPool", "Loop", "Erf", "NoSuchOperator"])
def test_missing_operator_names_its_extra(name):
    """An operator that numpy lacks is named with the extra that has it."""
    with pytest.raises(TaskError, match=f"does not have the operator '{name}'") as caught:
        find(name)
    assert "pip install 'shoal[edge]'" in caught.value.hint


@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_operator_takes_onnx_inputs(name):
    """An operator takes the numbers of inputs that onnx gives it."""
    schema, operator = defs.get_schema(name, 20), OPERATORS[name]
    assert operator.fewest == schema.min_input
    assert operator.most == (schema.max_input if schema.max_input < 1 << 30 else float("inf"))
    assert set(operator.letters) <= {"T", *_FIXED}
    assert operator.dtypes <= ANY


@pytest.mark.parametrize(
    ("operator", "inputs", "attributes", "message"),
    [
        *(
            (operator, inputs, {}, f"{operator} does not take ")
            for operator, *inputs in (
                ("Add", FLOATS, LONGS),
                ("Add", LONGS > 0, LONGS > 0),
                ("Exp", LONGS),
                ("Not", LONGS),
                ("And", LONGS, LONGS),
                ("MatMul", LONGS, LONGS),
                ("Pow", LONGS, LONGS),
                ("ReduceMean", LONGS),
                ("Reshape", FLOATS, np.array([4], np.int32)),
                ("Gather", FLOATS, FLOATS),
                ("Neg", FLOATS > 0),
                ("Max", FLOATS, FLOATS, LONGS),
            )
        ),
        ("Relu", [FLOATS], {"alpha": 1.0}, "Relu has the attribute 'alpha', which is not supported"),
        ("Softmax", [FLOATS], {"axis": "1"}, "Softmax's attribute 'axis' is of the wrong type"),
        ("Softmax", [FLOATS], {"axis": 1.0}, "Softmax's attribute 'axis' is of the wrong type"),
        ("Transpose", [FLOATS], {"perm": 1}, "Transpose's attribute 'perm' is of the wrong type"),
        ("Concat", [FLOATS], {}, "Concat lacks the attribute 'axis'"),
    ],
)
def test_other_dtypes_are_refused(operator, inputs, attributes, message):
    with pytest.raises(TaskError, match=message):
        numpy_run(operator, *inputs, **attributes)


@pytest.mark.parametrize(
    ("operator", "inputs"), [("Add", [FLOATS]), ("Relu", [FLOATS, FLOATS]), ("Add", [FLOATS, None]), ("Max", [])]
)
def test_other_numbers_of_inputs_are_refused(operator, inputs):
    node = Node(operator, tuple("" if v is None else "x" for v in inputs), ("y",), {})
    with pytest.raises(TaskError, match=f"{operator} does not take . inputs"):
        OPERATORS[operator].bind(node)


def test_a_constant_is_its_value():
    node = Node("Constant", (), ("y",), {"value": LONGS})
    assert OPERATORS["Constant"].bind(node)() is LONGS
    with pytest.raises(TaskError, match="lacks the attribute 'value'"):
        OPERATORS["Constant"].bind(Node("Constant", (), ("y",), {}))
    with pytest.raises(TaskError, match="Add has the attribute"):
        numpy_run("Add", FLOATS, FLOATS, value=tensor(1.5).__class__(data_type=TensorProto.FLOAT, raw_data=b"1234"))
