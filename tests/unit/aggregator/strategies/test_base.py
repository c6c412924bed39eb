"""The weight cap by examples, and that each strategy's mean uses it."""

import numpy as np
import pytest

from aggregator.numerics.averaging import capped_weights
from aggregator.strategies.base import capped_devices, mean_loss, mean_update, weights_of
from tests.helpers.plans import contribution, run_plan


@pytest.mark.parametrize(
    ("weights", "cap", "expected"),
    [
        ([10, 20, 30], 3.0, [10, 20, 30]),
        ([10, 10, 10, 2**32 - 1], 3.0, [10, 10, 10, 30]),
        ([10, 10, 10, 2**32 - 1], 0.0, [10, 10, 10, 2**32 - 1]),
        ([1, 2, 3, 1000], 1.0, [1, 2, 2.5, 2.5]),
        ([0, 0, 5], 3.0, [0, 0, 5]),
        ([7], 3.0, [7]),
        ([1, 1000], 3.0, [1, 1000]),
    ],
)
def test_no_weight_is_above_the_cap(weights, cap, expected):
    assert capped_weights(np.array(weights, np.float64), cap).tolist() == expected


def given():
    honest = [contribution(f"dev-{i}", [1.0] * 6, samples=10, loss=1.0) for i in range(4)]
    return [*honest, contribution("liar", [-1.0] * 6, samples=100_000, loss=0.0)]


def test_the_mean_follows_the_cluster_and_not_the_one_with_most_samples():
    assert mean_update(given(), "samples", 0.0)[0] < -0.99
    assert mean_update(given(), "samples", 3.0)[0] == pytest.approx((4 - 3) / 7)


def test_uniform_weights_are_never_capped():
    assert weights_of(given(), "uniform", 3.0).tolist() == [1.0] * 5
    assert capped_devices([given()], "uniform", 3.0) == {}


def test_the_capped_devices_are_named_with_their_weight():
    assert capped_devices([given()], "samples", 3.0) == {"liar": 30.0}
    assert capped_devices([given()], "samples", 0.0) == {}


def test_the_reported_loss_is_a_capped_mean_too():
    assert mean_loss(given(), run_plan()) == pytest.approx(4 / 7)
    assert mean_loss(given(), run_plan(weight_cap=0.0)) < 0.001
    assert mean_loss([], run_plan()) is None
