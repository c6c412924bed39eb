"""The naive kernels compute the same as the fast ones, so that the ratio of their times is fair."""

from __future__ import annotations

import numpy as np
import pytest
from shoal_lab.bench.numerics.kernels import Bench
from shoal_lab.bench.numerics.naive import cubic_madc, randomised_edc, union_find

from aggregator.numerics.embedding import edc, madc


def test_the_naive_forms_compute_the_same() -> None:
    bench = Bench(quick=True)
    similarity = bench.similarity(40)
    np.testing.assert_allclose(cubic_madc(similarity, 5, 9), madc(similarity)[5:9], atol=1e-12)
    assert union_find(similarity) == 2
    centres = bench.normal(3, 500)
    rows = centres[np.arange(20) % 3] + np.float32(0.1) * bench.normal(20, 500)
    np.testing.assert_allclose(np.abs(randomised_edc(rows, 3)), np.abs(edc(rows, 3)), atol=1e-3)


@pytest.mark.parametrize("size", [2, 3, 9])
def test_merging_ends_with_two_sets(size):
    """One device fewer in each merge, in whichever order the pairs come."""
    for seed in range(5):
        values = np.random.default_rng(seed).random((size, size))
        assert union_find((values + values.T) / 2) == 2


def test_madc_is_the_mean_difference_over_all_other_devices():
    """FedGroup's equation 7, written as two loops."""
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((6, 4))
    rows /= np.linalg.norm(rows, axis=1, keepdims=True)
    similarity = rows @ rows.T
    expected = np.zeros((6, 6))
    for i in range(6):
        for j in range(6):
            if i != j:
                others = [abs(similarity[i, z] - similarity[j, z]) for z in range(6) if z not in (i, j)]
                expected[i, j] = sum(others) / 4
    np.testing.assert_allclose(cubic_madc(similarity, 0, 6), expected, atol=1e-12)
    np.testing.assert_allclose(cubic_madc(similarity, 2, 4), expected[2:4], atol=1e-12)
