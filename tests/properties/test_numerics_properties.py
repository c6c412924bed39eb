"""Invariants of the kernels for any input."""

from __future__ import annotations

import hypothesis.extra.numpy as hnp
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.bipartition import bipartition
from aggregator.numerics.gap import separation_gap
from aggregator.numerics.similarity import cosine_matrix

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(2, 6), st.integers(1, 12)), elements=FINITE)


@st.composite
def similarities(draw: st.DrawFn) -> np.ndarray:
    """Symmetric matrices with many ties."""
    size = draw(st.integers(2, 9))
    values = draw(hnp.arrays(np.int8, (size, size), elements=st.integers(-10, 10)))
    upper = np.triu(values.astype(np.float64) / 10)
    return upper + np.triu(upper, 1).T


@given(ROWS)
def test_cosines_are_symmetric_bounded_and_one_on_the_diagonal(rows: np.ndarray) -> None:
    """For every finite input, down to subnormals and up to the largest float32."""
    cosines = cosine_matrix(rows)
    assert np.array_equal(cosines, cosines.T)
    assert np.abs(cosines).max() <= 1.0
    np.testing.assert_array_equal(np.diagonal(cosines), rows.any(axis=1).astype(float))


@given(ROWS)
def test_cosines_equal_float64_arithmetic(rows: np.ndarray) -> None:
    wide = rows.astype(np.float64)
    wide /= np.maximum(np.abs(wide).max(axis=1, keepdims=True), np.finfo(np.float64).tiny)
    norms = np.linalg.norm(wide, axis=1)
    norms[norms == 0] = 1.0
    np.testing.assert_allclose(cosine_matrix(rows), wide @ wide.T / norms[:, None] / norms[None, :], atol=2e-6)


@given(similarities(), st.sampled_from(["single", "complete"]))
def test_halves_partition_the_devices_and_meet_the_stated_cross_similarity(
    similarity: np.ndarray, linkage: str
) -> None:
    found = bipartition(similarity, linkage)
    assert sorted(found.left + found.right) == list(range(len(similarity)))
    assert found.left[0] == 0
    assert found.right
    assert found.cross_max == similarity[np.ix_(found.left, found.right)].max()


@given(similarities(), st.integers(0, 2**32 - 1))
def test_the_optimum_does_not_depend_on_the_order_of_devices(similarity: np.ndarray, seed: int) -> None:
    """Relabelled devices reach the same cross similarity, ties or not."""
    order = np.random.default_rng(seed).permutation(len(similarity))
    assert bipartition(similarity[np.ix_(order, order)]).cross_max == bipartition(similarity).cross_max


@given(st.integers(3, 12), st.integers(0, 2**32 - 1), st.sampled_from(["single", "complete"]))
def test_without_ties_the_halves_are_the_same_devices_in_any_order(size: int, seed: int, linkage: str) -> None:
    rng = np.random.default_rng(seed)
    similarity = rng.standard_normal((size, size))
    similarity += similarity.T
    order = rng.permutation(size)
    plain = bipartition(similarity, linkage)
    relabelled = bipartition(similarity[np.ix_(order, order)], linkage)
    halves = {frozenset(order[list(half)].tolist()) for half in (relabelled.left, relabelled.right)}
    assert halves == {frozenset(plain.left), frozenset(plain.right)}


@given(similarities())
def test_no_bipartition_by_complete_linkage_beats_the_optimum(similarity: np.ndarray) -> None:
    assert bipartition(similarity).cross_max <= bipartition(similarity, "complete").cross_max


@given(similarities(), st.data())
def test_a_positive_gap_means_no_group_is_cut(similarity: np.ndarray, data: st.DataObject) -> None:
    """Corollary 1 of cfl."""
    size = len(similarity)
    groups = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
    if separation_gap(similarity, groups).gap > 0:
        found = bipartition(similarity)
        assert not {groups[i] for i in found.left} & {groups[i] for i in found.right}


@given(
    hnp.arrays(np.float32, st.tuples(st.integers(1, 5), st.integers(1, 20)), elements=st.floats(-1e3, 1e3, width=32)),
    st.data(),
)
def test_the_mean_lies_between_the_rows(rows: np.ndarray, data: st.DataObject) -> None:
    count = len(rows)
    weights = np.array(data.draw(st.lists(st.floats(0.01, 1e4), min_size=count, max_size=count)))
    mean = weighted_mean(rows, weights)
    slack = 1e-5 * np.abs(rows).max(axis=0) + 1e-30
    assert (mean >= rows.min(axis=0) - slack).all()
    assert (mean <= rows.max(axis=0) + slack).all()
