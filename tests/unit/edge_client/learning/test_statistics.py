"""A device's statistics, and the scale of their mean: against the figures of all samples together."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.learning.statistics import LEAST_DEVIATION, scale_from, statistics_of
from shoal.errors import DataError, IntegrityError
from shoal.task.data_declaration import DataDeclaration

RUN = b"r" * 16
DATA = DataDeclaration(features=("a", "b"), low=(-10, 0), high=(10, 5000), standardise="federated")
RNG = np.random.default_rng(5)


def share(n, shift=0.0):
    return (RNG.standard_normal((n, 2)) * [1, 400] + [shift, 2500]).astype(np.float32)


def test_the_mean_of_equal_shares_gives_the_figures_of_all_samples():
    shares = [share(50, shift) for shift in (-1.0, 0.0, 2.0)]
    mean = np.mean([statistics_of(x, DATA, 9) for x in shares], axis=0)
    scale = scale_from(mean.astype(np.float32), DATA, RUN)
    together = np.concatenate(shares).astype(np.float64)
    np.testing.assert_allclose(scale.means, together.mean(axis=0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(scale.deviations, together.std(axis=0), rtol=1e-3)
    assert scale.run_id == RUN


def test_the_vector_is_bounded_padded_and_without_a_count():
    few, many = (statistics_of(np.full((n, 2), 1e30, np.float32), DATA, 7) for n in (1, 500))
    assert few.tolist() == [1, 1, 1, 1, 1, 0, 0]
    np.testing.assert_array_equal(few, many)
    assert few.dtype == np.float32


def test_noise_on_the_length_of_each_vector_cancels():
    found = statistics_of(share(50), DATA, 5)
    plain, noisy = scale_from(found, DATA, RUN), scale_from(found * np.float32(1.7), DATA, RUN)
    np.testing.assert_allclose(plain.means, noisy.means, rtol=1e-5)
    np.testing.assert_allclose(plain.deviations, noisy.deviations, rtol=1e-3)


def test_missing_values_do_not_count_and_a_feature_without_any_is_refused():
    x = np.array([[1, np.nan], [3, 1000], [np.nan, 3000]], np.float32)
    scale = scale_from(statistics_of(x, DATA, 5), DATA, RUN)
    np.testing.assert_allclose(scale.means, [2, 2000], rtol=1e-5)
    np.testing.assert_allclose(scale.deviations, [1, 1000], rtol=1e-4)
    x[:, 1] = np.nan
    with pytest.raises(DataError, match="column 'b' has no value in the training share"):
        statistics_of(x, DATA, 5)


def test_a_constant_feature_has_the_least_deviation_of_its_range():
    scale = scale_from(statistics_of(np.full((4, 2), 5.0, np.float32), DATA, 5), DATA, RUN)
    np.testing.assert_allclose(scale.deviations, [10 * LEAST_DEVIATION, 2500 * LEAST_DEVIATION], rtol=0.2)


@pytest.mark.parametrize(
    ("mean", "message"),
    [
        ([0, 0, 1, 1, 0], "no count of devices"),
        ([0, 0, 1, 1, -1], "no count of devices"),
        ([0, 0, np.nan, 1, 1], "no count of devices"),
        ([1.1, 0, 1, 1, 1], "outside of their bounds"),
        ([0, 0, 1.1, 1, 1], "outside of their bounds"),
        ([0.9, 0, 0.5, 1, 1], "outside of their bounds"),
    ],
)
def test_a_mean_that_no_statistics_have_is_refused(mean, message):
    with pytest.raises(IntegrityError, match=message) as caught:
        scale_from(np.array(mean, np.float32), DATA, RUN)
    assert "start a new run" in caught.value.hint
