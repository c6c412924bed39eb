"""Vectors that are not here take part in the numerics as arrays do."""

import numpy as np
import pytest

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.backend import cosine_matrix, gram, products
from aggregator.numerics.checks import NumericsError
from aggregator.numerics.parted import MOST_GRAM_BYTES, PartedVector, check_gram_size, is_parted
from aggregator.strategies.base import norm_of
from shoal.protocol.jobs import NodeKind

ROWS = np.random.default_rng(1).standard_normal((4, 50)).astype(np.float32)


class Space:
    """Evaluates updates and multiples of them from `ROWS`, and notes what it was asked for."""

    def __init__(self, rows=ROWS):
        self.rows = rows
        self.asked = []

    def _value(self, vector):
        if vector.kind is NodeKind.TIMES:
            return self._value(vector.items[0]) * np.float32(vector.weights[0])
        return self.rows[int(vector.device)]

    def gram(self, vectors, *, precise=False):
        self.asked.append("precise" if precise else "gram")
        return self.products(vectors, vectors)

    def products(self, vectors, others):
        with np.errstate(over="ignore"):
            return np.stack([self._value(v) for v in vectors]).astype(float) @ np.stack(
                [self._value(v) for v in others]
            ).T.astype(float)

    def squared_norms(self, vectors):
        return np.diagonal(self.products(vectors, vectors))


def updates(space):
    return [PartedVector(space, 50, NodeKind.UPDATE, device=str(i)) for i in range(len(space.rows))]


def test_workers_are_asked_for_products():
    """Products norms and cosines ask the workers."""
    space = Space()
    made = updates(space)
    np.testing.assert_allclose(gram(made), ROWS @ ROWS.T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(gram(made, precise=True), ROWS.astype(float) @ ROWS.T, rtol=1e-6)
    np.testing.assert_allclose(products(made[:1], made[1:]), ROWS[:1] @ ROWS[1:].T, rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(cosine_matrix(made), cosine_matrix(ROWS), atol=1e-6)
    assert norm_of(made[2]) == pytest.approx(np.linalg.norm(ROWS[2]))
    assert space.asked == ["gram", "precise", "gram"]


def test_cosines_of_tiny_updates_are_right():
    space = Space(ROWS * np.float32(1e-20))
    np.testing.assert_allclose(cosine_matrix(updates(space)), cosine_matrix(ROWS), atol=1e-5)


def test_a_mean_of_parts_is_a_description():
    made = updates(Space())
    mean = weighted_mean(made, np.array([1.0, 2.0, 0.0, 1.0]))
    assert (mean.kind, mean.items, mean.weights) == (NodeKind.MEAN, tuple(made), (1.0, 2.0, 0.0, 1.0))
    assert (mean.shape, mean.dtype, len(mean.copy())) == ((50,), np.float32, 50)
    with pytest.raises(NumericsError):
        weighted_mean(made, np.array([0.0, 0.0, 0.0, 0.0]))


def test_what_makes_no_sense_is_refused():
    one = updates(Space())[0]
    with pytest.raises(NumericsError, match="and ndarray"):
        one + ROWS[0]
    with pytest.raises(NumericsError, match="50 coordinates"):
        one - PartedVector(None, 4, NodeKind.UPDATE)
    with pytest.raises(NumericsError, match="slice of a slice"):
        one[1:9][1:2]
    with pytest.raises(NumericsError, match="take more than"):
        check_gram_size(int((MOST_GRAM_BYTES / 8) ** 0.5) + 1)
    assert not is_parted(ROWS)
    assert not is_parted([])
