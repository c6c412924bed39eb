"""The nearest of several models to a trained one: distances in float64, and ties."""

import numpy as np
import pytest

from edge_client.learning.nearest import BLOCK, nearest_model

RNG = np.random.default_rng(3)


def test_the_model_at_the_least_distance_is_chosen():
    models = {m: RNG.standard_normal(BLOCK + 7).astype(np.float32) for m in (1, 4, 6)}
    for target, theta in models.items():
        delta = 0.8 * (theta - models[4])
        assert nearest_model(4, delta, (1, 4, 6), models) == target
    # The last block counts too: the models differ in nothing else.
    end = {0: np.zeros(BLOCK + 7, np.float32), 1: np.zeros(BLOCK + 7, np.float32)}
    end[1][-1] = 1
    assert nearest_model(0, 0.6 * end[1], (0, 1), end) == 1


def test_only_models_to_compare_with_are_chosen():
    models = {0: np.zeros(3, np.float32), 1: np.ones(3, np.float32), 2: np.full(3, 2, np.float32)}
    assert nearest_model(0, np.zeros(3, np.float32), (1, 2), models) == 1


@pytest.mark.parametrize(("own", "expected"), [(0, 0), (2, 2), (5, 0)])
def test_at_a_tie_the_model_of_the_device_is_chosen_else_the_smallest(own, expected):
    models = dict.fromkeys((0, 2, 5), np.zeros(4, np.float32))
    compare = (0, 2) if own == 5 else (0, 2, 5)
    assert nearest_model(own, np.ones(4, np.float32), compare, models) == expected


def test_differences_below_the_rounding_of_float32_count():
    """The sum theta + delta in float32 would be the same for both."""
    models = {0: np.full(2, 1e6, np.float32), 1: np.full(2, 1e6, np.float32)}
    models[1][1] += np.float32(0.0625)
    assert nearest_model(0, np.array([0, 0.0325], np.float32), (0, 1), models) == 1
    assert nearest_model(0, np.array([0, 0.03], np.float32), (0, 1), models) == 0
