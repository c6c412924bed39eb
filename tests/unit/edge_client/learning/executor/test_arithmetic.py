"""Every computing operator against ONNX Runtime, and limits on a tensor's size."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes
from onnx import TensorProto

from edge_client.learning.executor.arithmetic import MAX_ELEMENTS, broadcast, checked
from shoal.errors import TaskError
from tests.helpers.executors import agree, numpy_run

BOOL, INT64, FLOAT = TensorProto.BOOL, TensorProto.INT64, TensorProto.FLOAT
SHAPES = [(), (1,), (5,), (2, 3), (0, 3), (2, 1, 4)]


def floats(shape, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * 3, np.float32)


def integers(shape, seed=0, dtype=np.int64):
    return np.asarray(np.random.default_rng(seed).integers(-9, 10, shape), dtype)


def shapes_of(inputs):
    return " ".join("none" if i is None else str(np.shape(i)) for i in inputs)


def case(operator, *inputs, **options):
    """Return a case of `agree` under a name that shows the shapes of its inputs."""
    return pytest.param(operator, inputs, options, id=f"{operator} {shapes_of(inputs)}")


def refused(operator, message, *inputs, **options):
    """Return a case of `numpy_run` that is refused with a message."""
    return pytest.param(operator, inputs, options, message, id=f"{operator} {shapes_of(inputs)}")


def alike(make):
    """Return (3, 4) numbers, and those with another second row."""
    a = make((3, 4))
    b = a.copy()
    b[1] = make((4,), 7)
    return a, b


INFINITE = np.array([np.inf, -np.inf, np.nan, 200.0, -200.0, 0.0, -1.0], np.float32)
LARGE = np.array([-1e4, -90, -20, 0, 20, 90, 1e4], np.float32)
POSITIVE = np.abs(floats((3, 4)))
TRUTH = np.array([[True], [False]]), np.array([True, False])
PARTS = [floats((2, 3)), floats((3,), 1), floats((1, 1), 2)]
FRACTIONS = np.array([[0, 1.9, -1.9], [3, -0.0, 0.4]], np.float32)
TIES = np.array([[1, 3, 3, 0], [3, 3, 1, 3]], np.float32)
COMPARISONS = ("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")


@pytest.mark.parametrize(
    ("operator", "inputs", "options"),
    [
        *(
            case(operator, floats(shape))
            for operator in ("Abs", "Exp", "Neg", "Relu", "Sigmoid", "Sign", "Tanh", "Reciprocal")
            for shape in SHAPES
        ),
        *(case(operator, POSITIVE) for operator in ("Log", "Sqrt")),
        # Infinities and nan are results without a warning.
        *(case(operator, INFINITE) for operator in ("Relu", "Exp", "Sqrt", "Log", "Neg", "Abs")),
        *(case(operator, LARGE) for operator in ("Sigmoid", "Tanh")),
        *(
            case(operator, integers((3, 4), dtype=dtype), integers((4,), 1, dtype))
            for operator in ("Add", "Sub", "Mul", "Max", "Min")
            for dtype in (np.int64, np.int32)
        ),
        *(
            case(operator, a, b, out_type=BOOL)
            for operator in COMPARISONS
            for left, right in map(alike, (floats, integers))
            for a, b in ((left, right), (left, right[0]))
        ),
        *(case(operator, *TRUTH, out_type=BOOL) for operator in ("And", "Or", "Equal")),
        case("Not", TRUTH[0], out_type=BOOL),
        *(case(operator, *PARTS[:count]) for operator in ("Max", "Min") for count in (1, 2, 3)),
        *(
            case("Pow", POSITIVE + 1, power)
            for exponent in (2, 3, 0.5, -1, 0)
            for power in (np.float32(exponent), np.full((4,), exponent, np.float32))
        ),
        case("Pow", floats((3, 4)), np.array(2, np.int64)),
        case("Pow", floats((3,)), np.full((2, 1), 2, np.float32)),
        case("Pow", floats(()), np.full((1, 1), 2, np.float32)),
        *(
            case("Cast", values, to=to, out_type=to)
            for to in (FLOAT, TensorProto.INT32, INT64, BOOL)
            for values in (FRACTIONS, np.array([0, 1, -5], np.int64), TRUTH[1])
        ),
        case("Where", floats((2, 1)) > 0, floats((3,)), floats(()), out_type=FLOAT),
        case("Where", np.array(True), integers((3,)), integers((2, 1), 1), out_type=INT64),
        *(
            case(operator, floats(shape), None if axes is None else np.array(axes, np.int64), keepdims=keepdims)
            for operator in ("ReduceSum", "ReduceMean")
            for keepdims in (0, 1)
            for axes in (None, [0], [-1], [0, 2], [1, 0, 2], [])
            for shape in ((2, 3, 4), (100, 30, 2))
        ),
        # A reduction over no axes may do nothing.
        *(
            case(operator, floats((2, 3)), axes, noop_with_empty_axes=1)
            for operator in ("ReduceSum", "ReduceMean")
            for axes in (None, np.zeros(0, np.int64))
        ),
        *(case(operator, floats(())) for operator in ("ReduceSum", "ReduceMean")),
        *(case("ReduceSum", integers((3, 4), dtype=dtype), keepdims=0) for dtype in (np.int32, np.int64)),
        *(
            case("ArgMax", TIES, axis=axis, keepdims=keepdims, select_last_index=last, out_type=INT64)
            for axis in (0, 1, -1)
            for keepdims in (0, 1)
            for last in (0, 1)
        ),
        *(
            case(operator, floats((3, 4, 5)) * np.float32(factor), axis=axis)
            for operator in ("Softmax", "LogSoftmax")
            for axis in (0, 1, -1)
            for factor in (1, 100)
        ),
        *(case(operator, floats((6, 2))) for operator in ("Softmax", "LogSoftmax")),
        *(
            case("MatMul", floats(a), floats(b, 1))
            for a, b in (
                ((2, 3), (3, 4)),
                ((3,), (3, 4)),
                ((2, 3), (3,)),
                ((3,), (3,)),
                ((5, 2, 3), (3, 4)),
                ((5, 2, 3), (5, 3, 4)),
                ((1, 2, 3), (6, 3, 1)),
                ((2, 0), (0, 3)),
            )
        ),
        *(
            case(
                "Gemm",
                floats((3, 2) if a else (2, 3)),
                floats((4, 3) if b else (3, 4), 1),
                *([] if c is None else [floats(c, 2)]),
                transA=a,
                transB=b,
                alpha=alpha,
                beta=beta,
            )
            for a in (0, 1)
            for b in (0, 1)
            for c in (None, (), (4,), (2, 1), (2, 4))
            for alpha, beta in ((1.0, 1.0), (0.5, -2.0))
        ),
    ],
)
def test_agrees_with_onnx_runtime(operator, inputs, options):
    agree(operator, *inputs, **options)


@pytest.mark.parametrize(
    ("operator", "inputs", "options", "message"),
    [
        refused("Cast", "Cast to element type 11", floats((2,)), to=TensorProto.DOUBLE),
        *(
            refused(operator, message, *map(floats, shapes))
            for operator, shapes, message in (
                ("MatMul", [(), (3,)], "no scalars"),
                ("MatMul", [(2, 3), (2, 3)], "MatMul: "),
                ("Gemm", [(2, 3, 1), (3, 4)], "takes matrices"),
                ("Gemm", [(2, 3), (3, 4), (5, 2, 4)], "Gemm adds shape"),
                ("Add", [(2,), (3,)], "do not fit"),
                ("Where", [(2,), (3,), (3,)], "does not take float32 as input 0"),
                ("ArgMax", [(0, 2)], "ArgMax: "),
                ("Softmax", [()], "axis -1 of a tensor of 0 dimensions"),
            )
        ),
    ],
)
def test_what_does_not_fit_is_refused(operator, inputs, options, message):
    with pytest.raises(TaskError, match=message):
        numpy_run(operator, *inputs, **options)


@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div", "Max", "Min"])
@settings(max_examples=8)
@given(shapes=mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=4), seed=st.integers(0, 99))
def test_arithmetic_broadcasts(operator, shapes, seed):
    a, b = (floats(shape, seed + i) for i, shape in enumerate(shapes.input_shapes))
    agree(operator, a, b)


def test_integers_are_divided_towards_zero():
    a = np.array([7, -7, 7, -7, 6, -6, 0], np.int64)
    b = np.array([2, 2, -2, -2, 3, 3, 5], np.int64)
    assert agree("Div", a, b)[0].tolist() == [3, -3, -3, 3, 2, -2, 0]
    with pytest.raises(TaskError, match="divided by zero"):
        numpy_run("Div", a, a)


def test_a_shape_up_to_the_limit_passes():
    assert checked([MAX_ELEMENTS]) == (MAX_ELEMENTS,)
    assert checked([]) == ()
    assert checked([0, 1 << 60]) == (0, 1 << 60)


@pytest.mark.parametrize("shape", [[MAX_ELEMENTS + 1], [1 << 62, 1 << 62], [2, MAX_ELEMENTS], [-1], [-2, -3]])
def test_other_shapes_are_refused(shape):
    with pytest.raises(TaskError, match=r"has more than 268435456 elements|negative shape"):
        checked(shape)


@settings(max_examples=60)
@given(mutually_broadcastable_shapes(num_shapes=2, min_side=0))
def test_shapes_broadcast_as_in_numpy(shapes):
    assert broadcast(*shapes.input_shapes) == np.broadcast_shapes(*shapes.input_shapes)


@pytest.mark.parametrize(("a", "b"), [((2,), (3,)), ((2, 1, 3), (4, 2)), ((0,), (2,))])
def test_shapes_that_do_not_fit_are_refused(a, b):
    with pytest.raises(ValueError, match="broadcast"):
        np.broadcast_shapes(a, b)
    for first, second in ((a, b), (b, a)):
        with pytest.raises(TaskError, match="do not fit together"):
            broadcast(first, second)
