"""FedGroup's cold starts on updates whose groups are known."""

import numpy as np
import pytest

from aggregator.strategies.fedgroup.strategy import fewest_updates, group_updates, nearest_directions, random_centres

RNG = np.random.default_rng(21)
TRUTH = [0, 1, 2, 1, 0, 2, 2, 0, 1, 1]
GOALS = RNG.standard_normal((3, 40))
ROWS = [(np.exp(RNG.normal()) * (GOALS[g] + 0.3 * RNG.standard_normal(40))).astype(np.float32) for g in TRUTH]


@pytest.mark.parametrize("measure", ["edc", "madc"])
def test_grouped_whatever_their_lengths(measure):
    """Directions are grouped whatever their lengths."""
    assert group_updates(ROWS, 3, measure, 0).tolist() == TRUTH


def test_centres_follow_the_seed():
    """Random centres are different and follow the seed."""
    draws = [random_centres(ROWS, 3, seed) for seed in range(20)]
    assert all(len(set(d)) == 3 and d == sorted(d) for d in draws)
    assert len({tuple(d) for d in draws}) > 10
    assert random_centres(ROWS, 3, 5) == draws[5]


def test_newcomer_goes_by_the_angle():
    """Eq. 9: the cosine to a long direction is no larger than to a short one."""
    directions = [(scale * g).astype(np.float32) for scale, g in zip((0.1, 100.0, 1.0), GOALS, strict=True)]
    assert nearest_directions(ROWS, directions) == TRUTH
    zero = np.zeros(40, np.float32)
    assert nearest_directions([ROWS[0], zero], [zero, GOALS[0].astype(np.float32)]) == [1, 0], "zero attracts nobody"


def test_madc_needs_a_third_update():
    """Madc needs a third update to compare with."""
    assert [fewest_updates(m, "madc") for m in (1, 2, 5)] == [3, 3, 5]
    assert [fewest_updates(m, "edc") for m in (1, 2, 5)] == [2, 2, 5]
