"""Limits on a tensor's size."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis.extra.numpy import mutually_broadcastable_shapes

from edge_client.learning.executor.arithmetic import MAX_ELEMENTS, broadcast, checked
from shoal.errors import TaskError


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
