"""Private values: each round trains them once, whatever is repeated, and damage is found."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.models.private_values import PrivateValues, initial_values, joined, parse_values
from shoal.errors import IntegrityError, TaskError
from tests.helpers.tasks import CLASSES, logistic_bundle

RUN, OTHER = b"r" * 16, b"o" * 16
INITIAL = np.array([1.0, 2.0, 3.0], np.float32)


def opened(stored=b"", run_id=RUN, initial=INITIAL):
    return PrivateValues(run_id, initial, stored)


def test_trained_values_go_on():
    """Values begin with the tasks and go on with the trained ones, also after a restart, but not in another run."""
    values = opened()
    assert values.newest is values.at(1) is INITIAL
    assert values.to_bytes() == b""
    values.keep(1, INITIAL + 1)
    for found in (values, opened(values.to_bytes())):
        np.testing.assert_array_equal(found.newest, INITIAL + 1)
        np.testing.assert_array_equal(found.at(1), INITIAL)
        np.testing.assert_array_equal(found.at(2), INITIAL + 1)
    np.testing.assert_array_equal(opened(values.to_bytes(), OTHER).newest, INITIAL)


@pytest.mark.slow
@given(st.lists(st.tuples(st.booleans(), st.booleans()), max_size=12))
def test_each_round_is_trained_once(story):
    """Training adds the round's number: after n rounds the values are the sum of 1 to n, however often one was repeated."""
    values, expected = opened(), INITIAL
    for round_, (repeated, killed) in enumerate(story, start=1):
        for _ in range(1 + repeated):
            values.keep(round_, values.at(round_) + np.float32(round_))
            values = opened(values.to_bytes()) if killed else values
        expected = expected + np.float32(round_)
    np.testing.assert_array_equal(values.newest, expected)


def test_damage_is_found():
    values = opened()
    values.keep(4, INITIAL + 1)
    data = values.to_bytes()
    for damaged in (b"x", data[:-1], data[:-40] + b"\0" * 40, data[:9] + b"\xff" + data[10:]):
        with pytest.raises(IntegrityError, match="damaged"):
            parse_values(damaged, RUN, 3)
    with pytest.raises(IntegrityError, match="twice 2 coordinates"):
        parse_values(data, RUN, 2)


def test_a_task_without_stores_nothing():
    """A task without private parameters stores none."""
    initial = initial_values(logistic_bundle())
    values = opened(initial=initial)
    values.keep(1, initial)
    assert values.newest.shape == (0,)
    assert values.to_bytes() == b""
    theta = np.ones(4, np.float32)
    assert joined(theta, initial) is theta


def test_initial_values_are_finite():
    bundle = logistic_bundle(private=np.arange(CLASSES))
    np.testing.assert_array_equal(initial_values(bundle), np.arange(CLASSES, dtype=np.float32))
    with pytest.raises(TaskError, match="not finite"):
        initial_values(logistic_bundle(private=[1.0, np.nan, 0.0]))
