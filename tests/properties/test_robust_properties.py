"""Robust means commute with every mask, and no rule gives a device more than its share."""

from __future__ import annotations

import dataclasses

import hypothesis.extra.numpy as hnp
import numpy as np
import pytest
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.backend import cosine_matrix, gram
from aggregator.numerics.bipartition import bipartition
from aggregator.numerics.clustering import complete_linkage, kmeans, kmeans_from_gram
from aggregator.numerics.embedding import edc, madc
from aggregator.numerics.robust import robust_weights
from aggregator.strategies.robust import RobustMean
from crypto.mask.masking import mask
from crypto.mask.modes.registry import MODES
from shoal import limits
from shoal.protocol.documents import SegmentSpec
from tests.helpers.masks import key_of
from tests.helpers.plans import contribution, run_plan

D = 3000
COUNT = 10
RULES = tuple(rule for rule in limits.ROBUST_RULES if rule != "off")


def updates(seed: int, factor: float, skew: float) -> np.ndarray:
    """Return honest updates (10, D) with a common part, the last three times ``factor``."""
    rng = np.random.default_rng(seed)
    rows = rng.standard_normal(D) + skew * rng.standard_normal((COUNT, D))
    rows[-3:] *= factor
    return rows.astype(np.float32)


def are_apart(rows: np.ndarray) -> bool:
    """Whether no two updates are as near to a third one, up to rounding: who of them is nearer decides the rule ``nnm``."""
    squares = ((rows[:, None, :].astype(np.float64) - rows[None, :, :]) ** 2).sum(2)
    near = np.sort(squares, axis=1)[:, 1:]
    return bool((np.diff(near, axis=1) > 1e-5 * near[:, 1:]).all())


@given(
    st.sampled_from(RULES),
    st.sampled_from(sorted(MODES)),
    st.integers(0, 2**32 - 1),
    st.sampled_from([1.0, -1.0, 9.0, -9.0]),
    st.floats(0.1, 10.0),
)
@example(rule="nnm", mode="permutation", seed=38399, factor=1.0, skew=3.0)  # two updates have the same neighbours
def test_masked_robust_mean_is_the_clear_one(rule: str, mode: str, seed: int, factor: float, skew: float) -> None:
    """The robust mean of masked updates is the masked mean."""
    key = key_of(mode, D)
    run = run_plan(robust=rule, segments=(SegmentSpec("cluster", D),))
    rows = updates(seed, factor, skew)
    assume(rule != "nnm" or are_apart(rows))
    clear = [contribution(f"dev-{i}", row, samples=10 + i) for i, row in enumerate(rows)]
    masked = [contribution(c.device, mask(c.row, key).values, samples=c.samples) for c in clear]
    expected = mask(RobustMean(run)(clear, "samples", 3.0), key).values
    found = RobustMean(run)(masked, "samples", 3.0)
    assert np.linalg.norm(found - expected) <= 1e-6 * np.linalg.norm(expected)


@given(
    st.sampled_from(RULES),
    st.integers(4, 12),
    st.integers(1, 12),
    st.integers(0, 2**32 - 1),
    st.floats(1e-3, 1e3),
)
def test_weights_add_up_to_the_plain_at_most(rule: str, count: int, length: int, seed: int, size: float) -> None:
    """Weights are not negative and add up to no more than the plain ones."""
    rng = np.random.default_rng(seed)
    rows = size * rng.standard_normal((count, length)) ** 3
    plain = rng.integers(0, 100, count).astype(float)
    plain[0] = 1.0
    found = robust_weights(rule, rows @ rows.T, plain, rng.random(count) < 0.3)
    assert (found.values >= 0).all()
    assert 0 < found.values.sum() <= plain.sum() * (1 + 1e-9)
    assert 2 * found.against.sum() < count
    assert not found.values[found.against].any() or not plain[~found.against].any()


@given(st.sampled_from(RULES), st.integers(0, 2**32 - 1), st.permutations(range(COUNT)))
def test_order_of_devices_does_not_matter(rule: str, seed: int, order: list[int]) -> None:
    rows = updates(seed, -1.0, 1.0).astype(float)
    plain = np.arange(1.0, COUNT + 1)
    one = robust_weights(rule, rows @ rows.T, plain).values
    other = robust_weights(rule, rows[order] @ rows[order].T, plain[order]).values
    np.testing.assert_allclose(other, one[order], atol=1e-6)


@pytest.mark.parametrize("rule", limits.ROBUST_RULES)
def test_longest_updates_have_a_mean(rule: str) -> None:
    """Products of such updates overflow float32."""
    run = run_plan(robust=rule, segments=(SegmentSpec("cluster", D),))
    rows = updates(0, 1.0, 1.0) * np.float32(1e30)
    given_ = [dataclasses.replace(contribution(f"dev-{i}", row), norm=1e30 * 80) for i, row in enumerate(rows)]
    assert np.isfinite(RobustMean(run)(given_, "uniform")).all()


# -- Invariants of the kernels for any input --


FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
ROWS = hnp.arrays(np.float32, st.tuples(st.integers(2, 6), st.integers(1, 12)), elements=FINITE)
ORDER_OF_SUMS = 5e-6
"""How far float32 sums of 300 products in another order may differ, in units of the largest: some sqrt(300) / 2 roundings."""


@st.composite
def similarities(draw: st.DrawFn) -> np.ndarray:
    """Symmetric matrices with many ties."""
    size = draw(st.integers(2, 9))
    values = draw(hnp.arrays(np.int8, (size, size), elements=st.integers(-10, 10)))
    upper = np.triu(values.astype(np.float64) / 10)
    return upper + np.triu(upper, 1).T


@given(ROWS)
def test_cosines_are_symmetric_and_bounded(rows: np.ndarray) -> None:
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


@given(similarities(), st.sampled_from(["single", "complete", "average"]))
def test_halves_partition_the_devices(similarity: np.ndarray, linkage: str) -> None:
    """Halves partition the devices and meet the stated cross similarity."""
    found = bipartition(similarity, linkage)
    assert sorted(found.left + found.right) == list(range(len(similarity)))
    assert found.left[0] == 0
    assert found.right
    assert found.cross_max == similarity[np.ix_(found.left, found.right)].max()


@given(similarities(), st.integers(0, 2**32 - 1))
def test_optimum_ignores_the_order(similarity: np.ndarray, seed: int) -> None:
    """Relabelled devices reach the same cross similarity, ties or not."""
    order = np.random.default_rng(seed).permutation(len(similarity))
    assert bipartition(similarity[np.ix_(order, order)]).cross_max == bipartition(similarity).cross_max


@given(st.integers(3, 12), st.integers(0, 2**32 - 1), st.sampled_from(["single", "complete", "average"]))
def test_order_does_not_matter_without_ties(size: int, seed: int, linkage: str) -> None:
    """Without ties the halves are the same devices in any order."""
    rng = np.random.default_rng(seed)
    similarity = rng.standard_normal((size, size))
    similarity += similarity.T
    order = rng.permutation(size)
    plain = bipartition(similarity, linkage)
    relabelled = bipartition(similarity[np.ix_(order, order)], linkage)
    halves = {frozenset(order[list(half)].tolist()) for half in (relabelled.left, relabelled.right)}
    assert halves == {frozenset(plain.left), frozenset(plain.right)}


@given(similarities())
def test_optimum_beats_complete_linkage(similarity: np.ndarray) -> None:
    """No bipartition by complete linkage beats the optimum."""
    assert bipartition(similarity).cross_max <= bipartition(similarity, "complete").cross_max


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


LOADS_PACKAGES = settings(deadline=None, max_examples=50)
"""The first example waits for scipy and scikit-learn to load."""

SMALL = st.floats(-100, 100, width=32).filter(lambda value: value == 0 or abs(value) > 1e-3)


@given(hnp.arrays(np.float32, st.tuples(st.integers(3, 8), st.integers(1, 12)), elements=SMALL), st.data())
def test_edc_of_all_directions_keeps_cosines(rows: np.ndarray, data: st.DataObject) -> None:
    """With m = n the rows of EDC are the unit vectors in another basis: their products are the cosines."""
    found = edc(rows, len(rows))
    np.testing.assert_allclose(found @ found.T, cosine_matrix(rows), atol=1e-5)
    m = data.draw(st.integers(1, len(rows)))
    np.testing.assert_array_equal(edc(rows, m), found[:, :m])
    assert np.abs(found).max() <= 1.0


@given(st.integers(3, 10), st.integers(2, 60), st.integers(0, 2**32 - 1))
def test_edc_equals_the_exact_decomposition(size: int, length: int, seed: int) -> None:
    """Up to signs, if the singular values are distinct, as those of random rows are."""
    rng = np.random.default_rng(seed)
    rows = (rng.standard_normal((size, length)) * np.geomspace(1, 30, size)[:, None]).astype(np.float32)
    wide = rows.astype(np.float64)
    m = min(3, size, length)
    left, values, _ = np.linalg.svd(wide.T, full_matrices=False)
    if np.diff(-values[: m + 1]).min() < 1e-3 * values[0]:
        return
    expected = wide @ left[:, :m] / np.linalg.norm(wide, axis=1)[:, None]
    np.testing.assert_allclose(np.abs(edc(rows, m)), np.abs(expected), atol=1e-8)


@LOADS_PACKAGES
@given(similarities().filter(lambda matrix: len(matrix) > 2))
def test_madc_equals_its_definition(similarity: np.ndarray) -> None:
    size = len(similarity)
    expected = np.zeros((size, size))
    for i, j in np.ndindex(size, size):
        others = [z for z in range(size) if z not in (i, j)]
        if i != j:
            expected[i, j] = np.abs(similarity[i, others] - similarity[j, others]).sum() / (size - 2)
    np.testing.assert_allclose(madc(similarity), expected, atol=1e-12)


def edc_distances(rows: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the distance of each pair of rows, which no choice of signs changes."""
    found: NDArray[np.float64] = np.linalg.norm(rows[:, None] - rows[None], axis=2)
    return found


@LOADS_PACKAGES
@given(st.integers(4, 12), st.integers(0, 2**32 - 1))
def test_shared_permutation_changes_nothing(size: int, seed: int) -> None:
    """The aggregator sees permuted updates: every measure and label is the same, and means are permuted."""
    rng = np.random.default_rng(seed)
    centres = 2 * rng.standard_normal((2, 300))
    rows = (centres[np.arange(size) % 2] + rng.standard_normal((size, 300))).astype(np.float32)
    order = rng.permutation(300)
    masked = np.ascontiguousarray(rows[:, order])
    np.testing.assert_allclose(gram(masked), gram(rows), atol=ORDER_OF_SUMS * float(gram(rows).max()))
    np.testing.assert_allclose(edc_distances(edc(masked, 2)), edc_distances(edc(rows, 2)), atol=1e-9)
    plain, hidden = madc(cosine_matrix(rows)), madc(cosine_matrix(masked))
    np.testing.assert_allclose(hidden, plain, atol=ORDER_OF_SUMS)
    np.testing.assert_array_equal(complete_linkage(hidden, 2), complete_linkage(plain, 2))
    np.testing.assert_array_equal(kmeans(edc(masked, 2), 2, 1), kmeans(edc(rows, 2), 2, 1))
    np.testing.assert_array_equal(kmeans_from_gram(gram(masked), 2, 1), kmeans_from_gram(gram(rows), 2, 1))
    weights = rng.integers(1, 50, size).astype(np.float64)
    assert weighted_mean(masked, weights).tobytes() == weighted_mean(rows, weights)[order].tobytes()


@LOADS_PACKAGES
@given(hnp.arrays(np.float64, st.tuples(st.integers(1, 9), st.integers(1, 3)), elements=st.integers(-3, 3)), st.data())
def test_labels_are_by_first_appearance(rows: np.ndarray, data: st.DataObject) -> None:
    """Rows with many ties; equal rows never part."""
    k = data.draw(st.integers(1, 5))
    labels = kmeans(rows, k, seed=0)
    firsts = [int(np.flatnonzero(labels == label)[0]) for label in range(labels.max() + 1)]
    assert firsts == sorted(firsts)
    assert labels.max() < k
    for i, j in np.ndindex(len(rows), len(rows)):
        if np.array_equal(rows[i], rows[j]):
            assert labels[i] == labels[j]
