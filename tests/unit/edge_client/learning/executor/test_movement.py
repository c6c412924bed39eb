"""Every operator that moves elements against ONNX Runtime."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from onnx import TensorProto

from shoal.errors import TaskError
from tests.helpers.executors import agree, numpy_run, tensor
from tests.unit.edge_client.learning.executor.test_arithmetic import case, refused

INT64, FLOAT = TensorProto.INT64, TensorProto.FLOAT


def numbers(*shape, dtype=np.float32):
    return np.arange(np.prod(shape, dtype=int), dtype=dtype).reshape(shape)


def longs(*values):
    return np.array(values, np.int64)


WHOLE, PLACES = numbers(2, 3, 4), np.array([[0, -1, 2], [4, 0, 1]])
UPDATES, LEVELS = np.array([[9, -8, 7], [6, 5, -40]], np.float32), np.array([0.5, 2], np.float32)


@pytest.mark.parametrize(
    ("operator", "inputs", "options"),
    [
        case("Identity", numbers(2, 3)),
        case("Transpose", WHOLE),
        case("Transpose", WHOLE, perm=[1, 0, 2]),
        case("Transpose", WHOLE > 5, perm=[2, 1, 0], out_type=TensorProto.BOOL),
        *(
            case("Shape", WHOLE, out_type=INT64, **cut)
            for cut in ({}, {"start": 1}, {"start": 0, "end": 1}, {"start": -2, "end": -1}, {"start": 9})
        ),
        *(case("Reshape", WHOLE, longs(*shape)) for shape in ((-1,), (4, 6), (0, -1), (2, 0, 4), (-1, 3, 2, 1))),
        case("Reshape", numbers(0, 3), longs(3, 0), allowzero=1),
        case("Reshape", numbers(1), longs()),
        case("Squeeze", numbers(1, 3, 1)),
        case("Squeeze", numbers(1, 3, 1), longs(0)),
        case("Squeeze", numbers(1, 3, 1), longs(-1, 0)),
        case("Unsqueeze", numbers(2, 3), longs(0)),
        case("Unsqueeze", numbers(2, 3), longs(-1, 1)),
        *(case("Expand", numbers(2, 3), longs(*shape)) for shape in ((2, 3), (4, 2, 3), (1, 1), (2, 1), ())),
        case("Expand", numbers(2, 1), longs(2, 3)),
        *(case("Concat", numbers(2, 3), numbers(2, 3) + 10, numbers(2, 3) + 20, axis=axis) for axis in (0, 1, -1)),
        case("Concat", numbers(2, dtype=np.int64), numbers(3, dtype=np.int64), axis=0),
        case("Split", numbers(7, 2), longs(3, 0, 4), outputs=3, axis=0),
        case("Split", numbers(2, 7), outputs=3, axis=-1, num_outputs=3),
        case("Split", numbers(2, 6), outputs=3, axis=1, num_outputs=3),
        case("Slice", numbers(5, 4), longs(1, 0), longs(3, 2)),
        case("Slice", numbers(5, 4), longs(1), longs(4), None, longs(2)),
        case("Slice", numbers(5, 4), np.array([1], np.int32), np.array([3], np.int32)),
        *(
            case("Gather", numbers(3, 4, 3), indices, axis=axis)
            for axis in (0, 1, -1)
            for indices in (longs(0, -1, 2), np.array([[1], [0]], np.int32), np.array(1))
        ),
        case("GatherElements", numbers(3, 4), np.array([[0, -1], [2, 1]]), axis=1),
        case("GatherElements", numbers(3, 4), np.array([[0, 1, 2, -3]], np.int32), axis=0),
        case("GatherElements", numbers(5), longs(4, 4, -5)),
        *(
            case("ScatterElements", numbers(3, 5) - 6, indices, updates, axis=axis, reduction=reduction)
            for reduction in ("none", "add", "mul", "max", "min")
            for indices, updates, axis in ((PLACES, UPDATES, 1), (np.array([[2, 1, 0]]), UPDATES[:1], 0))
        ),
        *(
            case("OneHot", np.array([[0, 2], [-1, 7]]), np.array(3), LEVELS, axis=axis, out_type=FLOAT)
            for axis in (-1, 0, 1)
        ),
        case("OneHot", longs(1, 0), np.array([3]), longs(0, 1), out_type=INT64),
        case("ConstantOfShape", longs(2, 3), out_type=FLOAT),
        case("ConstantOfShape", longs(2), value=tensor(longs(7)), out_type=INT64),
    ],
)
def test_agrees_with_onnx_runtime(operator, inputs, options):
    agree(operator, *inputs, **options)


@pytest.mark.parametrize(
    ("operator", "inputs", "options", "message"),
    [
        *(
            refused("Reshape", r"Reshape|negative", WHOLE, shape)
            for shape in (longs(5), longs(-1, -1), longs(-2, -12), longs(2, 3, 4, 0))
        ),
        refused("Squeeze", "Squeeze", numbers(2, 3), longs(0)),
        *(refused("Concat", "Concat", numbers(2, 3), other, axis=0) for other in (numbers(3, 4), numbers(3))),
        *(
            refused("Split", r"Split|list of integers", numbers(7), sizes, outputs=outputs)
            for sizes, outputs in (
                (longs(3, 3), 2),
                (longs(-1, 8), 2),
                (longs(3, 4), 3),
                (longs(), 1),
                (np.full((1, 1), 7), 1),
            )
        ),
        refused("Split", "either sizes or num_outputs", numbers(4), outputs=2),
        refused("Split", "either sizes or num_outputs", numbers(4), longs(2, 2), outputs=2, num_outputs=2),
        *(refused("Split", r"into . parts", numbers(4), outputs=2, num_outputs=parts) for parts in (0, 5)),
        *(
            refused("Slice", r"Slice|axis", numbers(3, 3), *cut)
            for cut in (
                (longs(0), longs(1), longs(0), longs(0)),
                (longs(0, 0), longs(1)),
                (longs(0, 0), longs(1, 1), longs(0, -2)),
                (longs(0, 0, 0), longs(1, 1, 1)),
                (longs(0), longs(1), longs(2)),
            )
        ),
        *(
            refused(operator, operator, numbers(4), longs(at), *more)
            for at in (4, -5)
            for operator, more in (("Gather", ()), ("GatherElements", ()), ("ScatterElements", (numbers(1),)))
        ),
        *(
            refused("GatherElements", "indices of shape", numbers(2, 3), indices, axis=0)
            for indices in (longs(0), np.zeros((1, 4), np.int64))
        ),
        refused("ScatterElements", "updates of shape", numbers(3), longs(0), numbers(2)),
        refused("ScatterElements", "reduction 'most'", numbers(3), longs(0), numbers(1), reduction="most"),
        refused("ConstantOfShape", "one number", longs(2), value=tensor(longs(7, 8))),
        # A result above the bound is refused before it takes memory.
        *(
            refused(operator, "has more than 268435456 elements", *inputs)
            for operator, *inputs in (
                ("Expand", numbers(1), longs(1 << 20, 1 << 20)),
                ("Expand", numbers(1 << 15, 1), longs(1, 1 << 15)),
                ("ConstantOfShape", longs(1 << 31)),
                ("OneHot", longs(0), np.array(1 << 40), longs(0, 1)),
                ("Gather", numbers(1, 1 << 16), np.zeros(1 << 16, np.int64)),
                ("MatMul", numbers(1 << 15, 1), numbers(1, 1 << 15)),
                ("Gemm", numbers(1 << 15, 1), numbers(1, 1 << 15)),
                ("Add", numbers(1 << 15, 1), numbers(1, 1 << 15)),
                ("Where", numbers(1 << 15, 1) > 0, numbers(1, 1 << 15), numbers(1)),
            )
        ),
        refused("Expand", "negative shape", numbers(1), longs(-1, -1)),
        refused("ConstantOfShape", "negative shape", longs(-1, -1)),
        refused("Concat", r"axis|axes", numbers(2), axis=1),
        refused("Gather", r"axis|axes", numbers(2), longs(0), axis=-2),
        refused("Transpose", r"axis|axes", numbers(2, 2), perm=[0, 2]),
    ],
)
def test_what_makes_no_sense_is_refused(operator, inputs, options, message):
    with pytest.raises(TaskError, match=message):
        numpy_run(operator, *inputs, **options)


BOUNDS = st.one_of(st.integers(-7, 7), st.sampled_from([-(2**63), 2**63 - 1]))


@settings(max_examples=60)
@given(
    cuts=st.lists(st.tuples(BOUNDS, BOUNDS, st.sampled_from([1, 2, 3, -1, -2])), min_size=1, max_size=2),
    last=st.booleans(),
)
def test_slices(cuts, last):
    # ONNX clamps the end, so this slice is empty; ONNX Runtime reads the largest end as the first element when it goes back.
    assume(not any(end == 2**63 - 1 and step < 0 for _, end, step in cuts))
    axes = [-1, 0][: len(cuts)] if last else [0, 1][: len(cuts)]
    starts, ends, steps = (longs(*part) for part in zip(*cuts, strict=True))
    agree("Slice", numbers(5, 4), starts, ends, longs(*axes), steps)


def test_scatter_adds_every_update():
    """An embedding's gradient: the same row several times."""
    indices = np.repeat(longs(1, 1, 0, 1), 3).reshape(4, 3)
    (found,) = agree("ScatterElements", np.zeros((2, 3), np.float32), indices, numbers(4, 3), axis=0, reduction="add")
    assert found[1].tolist() == [12, 15, 18]
