"""Recipes give the same bits on every platform, checked against exact arithmetic and a simulated processor."""

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from edge_client.models.recipes import BLOCK, TINY, evaluate, weighted_sum
from shoal.errors import IntegrityError, UsageError
from shoal.protocol.states import StateId
from tests.helpers.model_states import recipe, vector

SMALLEST_NORMAL = 2.0**-126
floats = st.floats(-(2.0**60), 2.0**60, width=32) | st.floats(-(2.0**-124), 2.0**-124, width=32)
weights = st.sampled_from([0.0, 1.0, -1.0, 0.1, 0.7, 1 / 3, 1e-12, 1e6]) | st.floats(1e-6, 1e6)
cases = st.integers(1, 5).flatmap(
    lambda d: st.lists(st.tuples(weights, hnp.arrays(np.float32, d, elements=floats)), min_size=1, max_size=4)
)


def bits(values):
    return np.asarray(values, np.float32).view(np.uint32).tolist()


def rounded(exact, *, drops_denormals):
    """Round a number to float32, as a processor does that keeps denormal numbers or drops them before rounding."""
    if drops_denormals and abs(exact) < SMALLEST_NORMAL:
        return np.float32(np.copysign(0.0, exact))
    return np.float32(exact)


def cleared(value, *, drops_denormals):
    if drops_denormals and abs(value) < SMALLEST_NORMAL:
        value = np.float32(np.copysign(0.0, value))
    return np.float32(0) if abs(value) < TINY else value


def reference(parts, *, drops_denormals):
    """Evaluate coordinate by coordinate: float64 holds products of float32 exactly, and rounds sums harmlessly."""
    out = []
    for column in zip(*(values for _, values in parts), strict=True):
        total = None
        for (weight, _), value in zip(parts, column, strict=True):
            value = cleared(value, drops_denormals=drops_denormals)
            product = np.float64(np.float32(weight)) * np.float64(value)
            product = cleared(rounded(product, drops_denormals=drops_denormals), drops_denormals=drops_denormals)
            if total is None:
                total = product
            else:
                exact = np.float64(total) + np.float64(product)
                total = cleared(rounded(exact, drops_denormals=drops_denormals), drops_denormals=drops_denormals)
        out.append(total)
    return out


@given(cases)
def test_bits_follow_from_the_rules_alone(parts):
    """On processors that keep denormal numbers and on those that drop them."""
    expected = reference(parts, drops_denormals=False)
    assert bits(weighted_sum(parts)) == bits(expected)
    assert bits(expected) == bits(reference(parts, drops_denormals=True))


def long_case(length=3 * BLOCK + 17):
    rng = np.random.default_rng(5)
    return [(w, (rng.integers(-(2**20), 2**20, length) / 2**17).astype(np.float32)) for w in (0.7, 0.2, 0.1, 1.0)]


def test_a_long_sum_has_the_known_bits():
    """The answer was computed with float64 and one rounding an operation; no platform may differ."""
    made = weighted_sum(long_case())
    assert hashlib.sha256(made.astype("<f4").tobytes()).hexdigest()[:16] == "641050ef3872b30e"


def test_layout_changes_no_bit():
    """Layout and alignment change no bit. Another order does, so it matters that all devices use the same."""
    parts = long_case(1001)
    strided = [(w, np.repeat(v, 2)[::2]) for w, v in parts]
    shifted = [(w, np.concatenate([v[:1], v])[1:]) for w, v in parts]
    assert weighted_sum(parts).tobytes() == weighted_sum(strided).tobytes() == weighted_sum(shifted).tobytes()
    assert weighted_sum(parts).tobytes() != weighted_sum(parts[::-1]).tobytes()


def test_minus_zero_and_denormals_are_zero():
    """In what is made of them; the arguments stay as they were."""
    values = vector(-0.0, 1e-39, -1e-45, 2.0**-126, -(2.0**-125), 1.0)
    assert bits(weighted_sum([(1.0, values)])) == bits([0, 0, 0, 0, -(2.0**-125), 1])
    assert bits(weighted_sum([(2.0, values), (1.0, values)]))[:4] == [0, 0, 0, 0]
    assert bits(values) == bits([-0.0, 1e-39, -1e-45, 2.0**-126, -(2.0**-125), 1.0])
    assert bits(weighted_sum([(-1.0, vector(0.0)), (1.0, vector(-0.0))])) == bits([0])
    assert bits(weighted_sum([(1.0, vector(2.0**-124)), (-1.0, vector(1.25 * 2.0**-124))])) == bits([0])
    assert bits(weighted_sum([(1e6, vector(1e-39))])) == bits([0])


@pytest.mark.parametrize(
    "parts",
    [
        [(1.0, vector(np.nan))],
        [(1.0, vector(np.inf))],
        [(1e6, vector(3e38))],
        [(1.0, vector(3e38)), (1.0, vector(3e38)), (-1.0, vector(3e38))],
        [(0.0, vector(np.inf))],
        [(1e6, vector(3e38)), (-1e6, vector(3e38))],
    ],
)
def test_infinite_results_are_refused(parts):
    """Results that are not finite are refused."""
    with pytest.raises(IntegrityError, match="NaN or infinite"):
        weighted_sum(parts)


def test_unlike_vectors_are_refused():
    """Vectors that do not belong together are refused."""
    for other in (vector(1, 2), np.array([1.0]), vector(1)[None]):
        with pytest.raises(UsageError, match="a vector of shape"):
            weighted_sum([(1.0, vector(1)), (1.0, other)])


def test_states_come_first_then_the_mean():
    """A recipe takes its states in order and the mean last."""
    held = {StateId(0, 3): vector(10, 20), StateId(1, 2): vector(1, 2)}
    restart = recipe(1, 4, (0, 3, 0.5), (1, 2, 2.0), mean=0.25)
    assert evaluate(restart, held, vector(4, 8)).tolist() == [8, 16]
    assert evaluate(recipe(0, 4, (0, 3)), held).tolist() == [10, 20]


def test_wrong_ingredients_are_refused():
    """A recipe with the wrong ingredients is refused."""
    held = {StateId(0, 3): vector(1)}
    with pytest.raises(UsageError, match="needs a mean"):
        evaluate(recipe(0, 4, (0, 3), mean=1.0), held)
    with pytest.raises(UsageError, match="has no mean"):
        evaluate(recipe(0, 4, (0, 3)), held, vector(1))
    with pytest.raises(IntegrityError, match="names state 3 of model 1") as caught:
        evaluate(recipe(0, 4, (1, 3)), held)
    assert "checkpoint" in caught.value.hint
