"""The smallest and the largest of five or more figures count for nothing, or as their neighbours."""

import numpy as np
import pytest
from scipy.stats.mstats import winsorize

from aggregator.numerics.robust import FEWEST_TRIMMED, inner, winsorised


@pytest.mark.parametrize("count", range(1, 13))
def test_ends_of_five_and_more_are_left_out(count):
    """One value of either end is left out of five and more."""
    values = np.random.default_rng(count).standard_normal(count)
    kept = inner(values)
    if count < FEWEST_TRIMMED:
        assert kept.all()
        assert winsorised(values) is values
        return
    assert sorted(values[kept]) == sorted(values)[1:-1]
    np.testing.assert_array_equal(winsorised(values), winsorize(values, limits=(1 / count, 1 / count)))


def test_equal_values_lose_two_as_well():
    """Equal values lose two of their number too."""
    assert inner(np.zeros(6)).sum() == 4
    assert winsorised(np.array([1.0, 1.0, 1.0, 1.0, 9.0])).tolist() == [1.0] * 5
