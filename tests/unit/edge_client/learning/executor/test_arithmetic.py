"""Every computing operator against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import mutually_broadcastable_shapes
from onnx import TensorProto

from shoal.errors import TaskError
from tests.helpers.executors import agree, numpy_run

BOOL, INT64, FLOAT = TensorProto.BOOL, TensorProto.INT64, TensorProto.FLOAT
SHAPES = [(), (1,), (5,), (2, 3), (0, 3), (2, 1, 4)]


def floats(shape, seed=0):
    return np.asarray(np.random.default_rng(seed).standard_normal(shape) * 3, np.float32)


def integers(shape, seed=0, dtype=np.int64):
    return np.asarray(np.random.default_rng(seed).integers(-9, 10, shape), dtype)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("operator", ["Abs", "Exp", "Neg", "Relu", "Sigmoid", "Sign", "Tanh", "Reciprocal"])
def test_elementwise_operators(operator, shape):
    agree(operator, floats(shape))


@pytest.mark.parametrize("operator", ["Log", "Sqrt"])
def test_operators_of_positive_numbers(operator):
    agree(operator, np.abs(floats((3, 4))))


@pytest.mark.parametrize("operator", ["Relu", "Exp", "Sqrt", "Log", "Neg", "Abs"])
def test_infinities_raise_no_warning(operator):
    """Infinities and nan are results without a warning."""
    agree(operator, np.array([np.inf, -np.inf, np.nan, 200.0, -200.0, 0.0, -1.0], np.float32))


def test_sigmoid_and_tanh_do_not_overflow():
    for operator in ("Sigmoid", "Tanh"):
        agree(operator, np.array([-1e4, -90, -20, 0, 20, 90, 1e4], np.float32))


@pytest.mark.parametrize("dtype", [np.int64, np.int32])
@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Max", "Min"])
def test_integers_stay_integers(operator, dtype):
    agree(operator, integers((3, 4), dtype=dtype), integers((4,), 1, dtype))


@pytest.mark.parametrize("operator", ["Add", "Sub", "Mul", "Div", "Max", "Min"])
@settings(max_examples=8)
@given(shapes=mutually_broadcastable_shapes(num_shapes=2, max_dims=3, max_side=4), seed=st.integers(0, 99))
def test_arithmetic_broadcasts(operator, shapes, seed):
    a, b = (floats(shape, seed + i) for i, shape in enumerate(shapes.input_shapes))
    agree(operator, a, b)


@pytest.mark.parametrize("operator", ["Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual"])
@pytest.mark.parametrize("make", [floats, integers])
def test_comparisons(operator, make):
    a = make((3, 4))
    b = a.copy()
    b[1] = make((4,), 7)
    agree(operator, a, b, out_type=BOOL)
    agree(operator, a, b[0], out_type=BOOL)


def test_logic():
    a, b = np.array([[True], [False]]), np.array([True, False])
    for operator in ("And", "Or", "Equal"):
        agree(operator, a, b, out_type=BOOL)
    agree("Not", a, out_type=BOOL)


def test_max_and_min_take_many_inputs():
    """Max and min take any number of inputs."""
    parts = [floats((2, 3)), floats((3,), 1), floats((1, 1), 2)]
    for count in (1, 2, 3):
        agree("Max", *parts[:count])
        agree("Min", *parts[:count])


def test_integers_are_divided_towards_zero():
    a = np.array([7, -7, 7, -7, 6, -6, 0], np.int64)
    b = np.array([2, 2, -2, -2, 3, 3, 5], np.int64)
    assert agree("Div", a, b)[0].tolist() == [3, -3, -3, 3, 2, -2, 0]
    with pytest.raises(TaskError, match="divided by zero"):
        numpy_run("Div", a, a)


@pytest.mark.parametrize("exponent", [2, 3, 0.5, -1, 0])
def test_powers(exponent):
    agree("Pow", np.abs(floats((3, 4))) + 1, np.float32(exponent))
    agree("Pow", np.abs(floats((3, 4))) + 1, np.full((4,), exponent, np.float32))


def test_powers_of_integers():
    """Powers of integers and broadcast bases."""
    agree("Pow", floats((3, 4)), np.array(2, np.int64))
    agree("Pow", floats((3,)), np.full((2, 1), 2, np.float32))
    agree("Pow", floats(()), np.full((1, 1), 2, np.float32))


@pytest.mark.parametrize("to", [FLOAT, TensorProto.INT32, INT64, BOOL])
def test_casts(to):
    agree("Cast", np.array([[0, 1.9, -1.9], [3, -0.0, 0.4]], np.float32), to=to, out_type=to)
    agree("Cast", np.array([0, 1, -5], np.int64), to=to, out_type=to)
    agree("Cast", np.array([True, False]), to=to, out_type=to)


def test_unsupported_cast_is_refused():
    """A cast to a type that is not supported is refused."""
    with pytest.raises(TaskError, match="Cast to element type 11"):
        numpy_run("Cast", floats((2,)), to=TensorProto.DOUBLE)


def test_where_broadcasts_three_inputs():
    agree("Where", floats((2, 1)) > 0, floats((3,)), floats(()), out_type=FLOAT)
    agree("Where", np.array(True), integers((3,)), integers((2, 1), 1), out_type=INT64)


@pytest.mark.parametrize("operator", ["ReduceSum", "ReduceMean"])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("axes", [None, [0], [-1], [0, 2], [1, 0, 2], []])
def test_reductions(operator, keepdims, axes):
    given_axes = None if axes is None else np.array(axes, np.int64)
    for shape in ((2, 3, 4), (100, 30, 2)):
        agree(operator, floats(shape), given_axes, keepdims=keepdims)


@pytest.mark.parametrize("operator", ["ReduceSum", "ReduceMean"])
def test_no_axes_may_do_nothing(operator):
    """A reduction over no axes may do nothing."""
    for axes in (None, np.zeros(0, np.int64)):
        agree(operator, floats((2, 3)), axes, noop_with_empty_axes=1)
    agree(operator, floats(()))


@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_a_sum_of_integers_keeps_its_dtype(dtype):
    agree("ReduceSum", integers((3, 4), dtype=dtype), keepdims=0)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("keepdims", [0, 1])
@pytest.mark.parametrize("last", [0, 1])
def test_argmax_of_ties_is_first_or_the_last(axis, keepdims, last):
    ties = np.array([[1, 3, 3, 0], [3, 3, 1, 3]], np.float32)
    agree("ArgMax", ties, axis=axis, keepdims=keepdims, select_last_index=last, out_type=INT64)


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("axis", [0, 1, -1])
def test_softmax(operator, axis):
    agree(operator, floats((3, 4, 5)), axis=axis)
    agree(operator, floats((3, 4, 5)) * 100, axis=axis)
    agree(operator, floats((6, 2)))


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ((2, 3), (3, 4)),
        ((3,), (3, 4)),
        ((2, 3), (3,)),
        ((3,), (3,)),
        ((5, 2, 3), (3, 4)),
        ((5, 2, 3), (5, 3, 4)),
        ((1, 2, 3), (6, 3, 1)),
        ((2, 0), (0, 3)),
    ],
)
def test_matrix_products(a, b):
    agree("MatMul", floats(a), floats(b, 1))


@pytest.mark.parametrize("flips", [(0, 0), (0, 1), (1, 0), (1, 1)])
@pytest.mark.parametrize("c", [None, (), (4,), (2, 1), (2, 4)])
@pytest.mark.parametrize("factors", [(1.0, 1.0), (0.5, -2.0)])
def test_gemm(flips, c, factors):
    a = floats((3, 2) if flips[0] else (2, 3))
    b = floats((4, 3) if flips[1] else (3, 4), 1)
    added = [] if c is None else [floats(c, 2)]
    agree("Gemm", a, b, *added, transA=flips[0], transB=flips[1], alpha=factors[0], beta=factors[1])


@pytest.mark.parametrize(
    ("operator", "inputs", "message"),
    [
        ("MatMul", [(), (3,)], "no scalars"),
        ("MatMul", [(2, 3), (2, 3)], "MatMul: "),
        ("Gemm", [(2, 3, 1), (3, 4)], "takes matrices"),
        ("Gemm", [(2, 3), (3, 4), (5, 2, 4)], "Gemm adds shape"),
        ("Add", [(2,), (3,)], "do not fit"),
        ("Where", [(2,), (3,), (3,)], "does not take float32 as input 0"),
        ("ArgMax", [(0, 2)], "ArgMax: "),
        ("Softmax", [()], "axis -1 of a tensor of 0 dimensions"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(operator, inputs, message):
    with pytest.raises(TaskError, match=message):
        numpy_run(operator, *(floats(shape) for shape in inputs))
