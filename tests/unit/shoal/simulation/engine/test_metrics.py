"""Purity and the adjusted Rand index against figures worked out by hand."""

import numpy as np
import pytest

from shoal.simulation.engine import metrics


def test_known_tables():
    """A device a cluster is pure, and as good as a random clustering."""
    assert metrics.purity([0, 0, 1, 1], [5, 5, 7, 7]) == metrics.adjusted_rand([0, 0, 1, 1], [5, 5, 7, 7]) == 1.0
    assert metrics.purity([0, 0, 0, 1], [1, 1, 2, 2]) == 0.75
    assert metrics.adjusted_rand([0, 0, 1, 1], [0, 1, 0, 1]) == pytest.approx(-0.5)
    assert metrics.adjusted_rand([0, 0, 0, 0], [0, 0, 1, 1]) == 0.0
    assert metrics.purity(range(4), [0, 0, 1, 1]) == 1.0
    assert metrics.adjusted_rand(range(4), [0, 0, 1, 1]) == 0.0


def test_table_counts_pairs_in_order():
    """A table counts pairs of labels in order of appearance."""
    table = metrics.contingency(["b", "a", "b", "b"], [9, 9, 4, 9])
    assert table.tolist() == [[2, 1], [1, 0]]
    assert table.dtype == np.int64


def test_rand_index_ignores_names():
    """Hubert and Arabie by hand: 2 pairs are together in both, 4 in either, of 10: expected are 1.6."""
    found, truth = [0, 0, 0, 1, 1], ["x", "x", "y", "y", "y"]
    assert metrics.adjusted_rand(found, truth) == pytest.approx((2 - 1.6) / (4 - 1.6))
    assert metrics.adjusted_rand(truth, found) == metrics.adjusted_rand(found, truth)
    assert metrics.adjusted_rand([5, 5, 5, 2, 2], truth) == metrics.adjusted_rand(found, truth)


@pytest.mark.parametrize("labels", [[3], [1, 1, 1], [1, 2, 3]])
def test_equal_partitions_are_perfect(labels):
    """Equal partitions are perfect also where chance can do no worse."""
    assert metrics.adjusted_rand(labels, labels) == metrics.purity(labels, labels) == 1.0


def test_different_devices_are_refused():
    """Clusters and groups of different devices are refused."""
    with pytest.raises(ValueError, match="zip"):
        metrics.purity([0, 1], [0])
