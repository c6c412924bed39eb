"""Standardisation: the scale of a share, its use, missing and constant values, and the scales of other runs."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.learning import standardisation
from edge_client.learning.data import Dataset, split
from edge_client.learning.standardisation import (
    LARGEST,
    local_scale,
    moments,
    prepared,
    rescaled,
    scale_for,
    standardised,
)
from edge_client.storage.scales import Scale, Scales
from shoal.errors import IntegrityError
from shoal.task.data_declaration import DataDeclaration
from tests.helpers.tasks import manifest

RUN = b"r" * 16
RNG = np.random.default_rng(4)
X = (RNG.standard_normal((50, 3)) * [1, 1000, 0.01] + [0, 5e4, 7]).astype(np.float32)


def test_result_has_mean_0_and_deviation_1():
    scale = local_scale(X, RUN)
    np.testing.assert_allclose(scale.means, X.astype(float).mean(axis=0), rtol=1e-12)
    np.testing.assert_allclose(scale.deviations, X.astype(float).std(axis=0), rtol=1e-9)
    found = standardised(X, scale)
    assert (found.dtype, found.shape) == (np.float32, X.shape)
    np.testing.assert_allclose(found.mean(axis=0), 0, atol=1e-6)
    np.testing.assert_allclose(found.std(axis=0), 1, rtol=1e-5)


def test_blocks_give_the_same_result(monkeypatch):
    scale, found = local_scale(X, RUN), standardised(X, local_scale(X, RUN))
    monkeypatch.setattr(standardisation, "_BLOCK", 7)
    np.testing.assert_allclose(local_scale(X, RUN).means, scale.means, rtol=1e-12)
    np.testing.assert_array_equal(standardised(X, scale), found)


def test_missing_values_become_the_mean():
    """Missing values do not count and become the mean."""
    x = np.array([[1, np.nan], [3, np.nan], [np.nan, np.nan]], np.float32)
    sums, squares, counts = moments(x, np.zeros(1))
    assert (sums.tolist(), squares.tolist(), counts.tolist()) == ([4, 0], [10, 0], [2, 0])
    scale = local_scale(x, RUN)
    assert (scale.means, scale.deviations) == ((2.0, 0.0), (1.0, 1.0))
    assert standardised(x, scale).tolist() == [[-1, 0], [1, 0], [0, 0]]


def test_constant_is_0_and_absurd_is_limited():
    """A constant is 0 and an absurd value is limited."""
    x = np.full((4, 1), 16777216.0, np.float32)
    assert standardised(x, local_scale(x, RUN)).tolist() == [[0.0]] * 4
    found = standardised(np.array([[3e38], [-3e38]], np.float32), Scale(RUN, (0.0,), (1e-30,)))
    assert found.tolist() == [[LARGEST], [-LARGEST]]


def test_values_keep_their_places():
    """Values keep their places in a sample of any shape."""
    x = X[:12].reshape(3, 2, 2, 3)
    found = standardised(x, local_scale(x, RUN))
    assert found.shape == x.shape
    flat = x.reshape(3, 12).astype(float)
    np.testing.assert_allclose(found.reshape(3, 12), (flat - flat.mean(0)) / flat.std(0), rtol=1e-4, atol=1e-5)


def test_all_shares_have_one_scale():
    """All shares have the scale of the training share."""
    splits = split(Dataset(X, np.zeros(50, np.int64)), b"s")
    scale = local_scale(splits.train.x, RUN)
    done = prepared(splits, scale)
    np.testing.assert_array_equal(done.test.x, standardised(splits.test.x, scale))
    np.testing.assert_array_equal(done.validation.y, splits.validation.y)
    assert prepared(splits, None) is splits


def test_share_moves_to_scale_of_another_run():
    own, other = local_scale(X, RUN), Scale(b"o" * 16, (1.0, 2.0, 3.0), (4.0, 5.0, 6.0))
    share = Dataset(standardised(X, own), np.zeros(50, np.int64))
    np.testing.assert_allclose(rescaled(share, own, other).x, standardised(X, other), rtol=1e-4, atol=1e-4)
    assert rescaled(share, own, own) is share
    assert rescaled(share, None, None) is share


def test_scale_of_the_run_is_needed(tmp_path):
    """A task that standardises needs the scale of its run."""
    scales = Scales(tmp_path)
    task = manifest(data=DataDeclaration(standardise="local"))
    assert scale_for(manifest(), scales, RUN) is None
    with pytest.raises(IntegrityError, match="no scale of the run"):
        scale_for(task, scales, RUN)
    scales.save(Scale(RUN, (0.0,) * 3, (1.0,) * 3))
    with pytest.raises(IntegrityError, match="no scale of the run"):
        scale_for(task, scales, RUN)
    fits = Scale(RUN, (0.0,) * 4, (1.0,) * 4)
    scales.save(fits)
    assert scale_for(task, scales, RUN) == fits
