"""A device's statistics, and the scale of their mean: against the figures of all samples together."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.learning.statistics import COUNT, LEAST_DEVIATION, scale_doubt, scale_from, statistics_of
from edge_client.storage.scales import Scales
from shoal.errors import DataError, IntegrityError
from shoal.task.data_declaration import DataDeclaration

RUN = b"r" * 16
DATA = DataDeclaration(features=("a", "b"), low=(-10, 0), high=(10, 5000), standardise="federated")
RNG = np.random.default_rng(5)


def share(n, shift=0.0):
    return (RNG.standard_normal((n, 2)) * [1, 400] + [shift, 2500]).astype(np.float32)


def test_mean_of_shares_is_of_all_samples():
    """The mean of equal shares gives the figures of all samples."""
    shares = [share(50, shift) for shift in (-1.0, 0.0, 2.0)]
    mean = np.mean([statistics_of(x, DATA, 9) for x in shares], axis=0)
    scale = scale_from(mean.astype(np.float32), DATA, RUN)
    together = np.concatenate(shares).astype(np.float64)
    np.testing.assert_allclose(scale.means, together.mean(axis=0), rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(scale.deviations, together.std(axis=0), rtol=1e-3)
    assert scale.run_id == RUN


def test_vector_is_bounded_and_padded():
    """The vector is bounded padded and without a count."""
    few, many = (statistics_of(np.full((n, 2), 1e30, np.float32), DATA, 7) for n in (1, 500))
    assert few.tolist() == [1, 1, 1, 1, 1, 0, 0]
    np.testing.assert_array_equal(few, many)
    assert few.dtype == np.float32


def test_noise_on_lengths_cancels():
    """Noise on the length of each vector cancels."""
    found = statistics_of(share(50), DATA, 5)
    plain, noisy = scale_from(found, DATA, RUN), scale_from(found * np.float32(1.7), DATA, RUN)
    np.testing.assert_allclose(plain.means, noisy.means, rtol=1e-5)
    np.testing.assert_allclose(plain.deviations, noisy.deviations, rtol=1e-3)


def test_missing_values_do_not_count():
    """Missing values do not count and a feature without any is refused."""
    x = np.array([[1, np.nan], [3, 1000], [np.nan, 3000]], np.float32)
    scale = scale_from(statistics_of(x, DATA, 5), DATA, RUN)
    np.testing.assert_allclose(scale.means, [2, 2000], rtol=1e-5)
    np.testing.assert_allclose(scale.deviations, [1, 1000], rtol=1e-4)
    x[:, 1] = np.nan
    with pytest.raises(DataError, match="column 'b' has no value in the training share"):
        statistics_of(x, DATA, 5)


def test_constant_has_the_least_deviation():
    """A constant feature has the least deviation of its range."""
    scale = scale_from(statistics_of(np.full((4, 2), 5.0, np.float32), DATA, 5), DATA, RUN)
    np.testing.assert_allclose(scale.deviations, [10 * LEAST_DEVIATION, 2500 * LEAST_DEVIATION], rtol=0.2)


@pytest.mark.parametrize(
    ("mean", "doubted", "means", "deviations"),
    [
        ([0, 0, 1, 1, 1], (), (0, 0), (1, 1)),
        ([0.5, 0, 0.5, 1, 1], (), (0.5, 0), (0.5, 1)),
        ([0.9, 0, 0.5, 1, 1], ("feature 'a'",), (0.9, 0), (LEAST_DEVIATION, 1)),
        ([0.9, 0, 0.8, -0.9, 1], ("feature 'a'", "feature 'b'"), (0.9, 0), (LEAST_DEVIATION, LEAST_DEVIATION)),
        ([1.1, 0, 1, 1, 1], ("feature 'a'",), (1, 0), (LEAST_DEVIATION, 1)),
        ([0.6, -1e30, 1.1, 1e30, 1], ("feature 'a'", "feature 'b'"), (0.6, -1), (0.8, LEAST_DEVIATION)),
        ([0, 0, 1, 1, 0], ("feature 'a'", "feature 'b'", COUNT), (0, 0), (1, 1)),
        ([0, 0, 1, 1, -1e30], ("feature 'a'", "feature 'b'", COUNT), (0, 0), (1, 1)),
        ([0, 0, 0.8, 0.8, 0.8], (), (0, 0), (1, 1)),
        ([0, 0, 1, 1, 3], (COUNT,), (0, 0), (1, 1)),
    ],
)
def test_impossible_mean_is_limited(mean, doubted, means, deviations):
    """In halves of the declared range, of 10 and 2500."""
    scale = scale_from(np.array(mean, np.float32), DATA, RUN, noise=0.0)
    assert scale.doubted == doubted
    np.testing.assert_allclose(scale.means, [10 * means[0], 2500 + 2500 * means[1]], atol=1e-2)
    np.testing.assert_allclose(scale.deviations, [10 * deviations[0], 2500 * deviations[1]], rtol=1e-5)
    told = scale_doubt(scale)
    assert bool(told) == bool(doubted)
    assert all(name in told for name in doubted)


def test_stretched_by_32_at_most():
    """Whatever a device sends that is finite: the bounds are at most so far apart, and the declared range is not exceeded."""
    rng = np.random.default_rng(7)
    size = 10.0 ** rng.uniform(-8, 30, (2000, 5))
    for mean in (rng.choice([-1, 1], size.shape) * size).astype(np.float32):
        scale = scale_from(mean, DATA, RUN, noise=rng.choice([0.0, 0.2]))
        for at in range(2):
            low, high = ((end - scale.means[at]) / scale.deviations[at] for end in (DATA.low[at], DATA.high[at]))
            assert low <= 1e-9
            assert high >= -1e-9
            assert 2 - 1e-9 <= high - low <= 2 / LEAST_DEVIATION + 1e-9


@pytest.mark.parametrize("mean", [[0, 0, np.nan, 1, 1], [0, 0, 1, 1, np.inf], [0] * 5])
def test_mean_not_finite_is_refused(mean):
    """A mean that is not finite or that is none yet is refused."""
    with pytest.raises(IntegrityError, match="no statistics yet, or not finite ones") as caught:
        scale_from(np.array(mean, np.float32), DATA, RUN)
    assert "start a new run" in caught.value.hint


def test_scale_names_its_features(tmp_path):
    """A scale that names features is stored with them."""
    scale = scale_from(np.array([0, 0, -1, 1, 1], np.float32), DATA, RUN)
    Scales(tmp_path).save(scale)
    assert Scales(tmp_path).load(RUN) == scale
    assert scale.doubted == ("feature 'a'",)
