"""A fresh start has each tensor's mean and spread, and shows nothing else of the origin."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.models.fresh_start import TensorFigures, draw, figures_of
from shoal.errors import IntegrityError
from shoal.protocol.codec import decode, encode

LENGTHS = (4000, 50, 50, 1)


@pytest.fixture
def origin():
    rng = np.random.default_rng(2)
    parts = [rng.uniform(-0.1, 0.1, 4000), np.ones(50), np.zeros(50), [0.123456]]
    return np.concatenate(parts).astype(np.float32)


def test_draw_has_the_figures_of_the_origin(origin):
    """Neither the coordinates of a large tensor nor the one of a small tensor are stored."""
    found = draw(figures_of(origin, LENGTHS), LENGTHS, 7)
    assert found.dtype == np.float32
    assert found[:4000].std() == pytest.approx(origin[:4000].std(), rel=0.05)
    assert abs(found[:4000].mean() - origin[:4000].mean()) < 0.005
    np.testing.assert_array_equal(found[4000:4100], origin[4000:4100])
    assert abs(np.corrcoef(found[:4000], origin[:4000])[0, 1]) < 0.1
    assert found[-1] == np.float32(0.12)


def test_a_draw_repeats_by_its_seed(origin):
    figures = figures_of(origin, LENGTHS)
    first, again, other = (draw(figures, LENGTHS, seed) for seed in (7, 7, 8))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first[:4000], other[:4000])
    # Known answer: the draw must not change with a library.
    np.testing.assert_array_equal(
        draw(TensorFigures((1.0,), (0.5,)), (3,), 5), np.array([1.0823236, 1.4007056, 0.6494131], np.float32)
    )


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=3, max_size=30))
def test_figures_are_finite_and_travel(values):
    """Figures of any model are finite and travel through the codec."""
    theta = np.array(values, np.float32)
    figures = figures_of(theta, (1, 1, len(theta) - 2))
    assert decode(encode(figures), TensorFigures) == figures
    assert np.isfinite(draw(figures, (1, 1, len(theta) - 2), 0)).all()


def test_figures_of_another_task_are_refused(origin):
    with pytest.raises(IntegrityError, match="figures of 4 tensors for a task of 2"):
        draw(figures_of(origin, LENGTHS), (4100, 1), 7)
