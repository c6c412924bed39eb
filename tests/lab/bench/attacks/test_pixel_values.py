"""Histograms of grey levels, read from a gradient's values in any order."""

import dataclasses

import numpy as np
import pytest
from shoal_lab.bench.attacks.pixel_values import histogram, levels_of, run, true_histogram


def image(levels=16, pixels=64, seed=0):
    """Return an image with all grey levels; half of it is black and a few pixels are white."""
    rng = np.random.default_rng(seed)
    x = rng.integers(0, levels + 1, pixels).astype(np.float32) / levels
    x[: pixels // 2] = 0
    x[-4:] = 1
    return x


def gradient_of(x, units=20, seed=1):
    """Return the first layer's gradient of one image in a random order."""
    rng = np.random.default_rng(seed)
    return rng.permutation((rng.standard_normal((units, 1)) * x).ravel()).astype(np.float32)


def test_the_true_histogram_leaves_out_black():
    found = true_histogram(np.array([0, 0, 1 / 16, 1, 1, 0.5], np.float32), 16)
    assert found[[0, 7, 15]].tolist() == [0.25, 0.25, 0.5]
    assert found.sum() == 1
    assert len(found) == 16


@pytest.mark.parametrize("levels", [16, 255])
def test_the_levels_of_an_image_are_read_in_any_order_and_with_any_signs(levels):
    x = image(levels, 256 if levels > 16 else 64)
    found, truth = histogram(gradient_of(x), levels), true_histogram(x, levels)
    assert len(found) == levels
    assert np.minimum(found, truth).sum() > 0.9
    flipped = gradient_of(x) * np.where(np.arange(20 * len(x)) % 2, 1, -1)
    np.testing.assert_allclose(histogram(flipped.astype(np.float32), levels), found)


def test_values_without_a_common_factor_show_less_than_the_usual_image():
    x = image()
    noise = np.random.default_rng(3).standard_normal(20 * 64).astype(np.float32)
    usual = true_histogram(np.concatenate([image(seed=s) for s in range(9)]), 16)
    truth = true_histogram(x, 16)
    assert np.minimum(histogram(noise, 16), truth).sum() < np.minimum(usual, truth).sum()


@pytest.mark.torch
def test_the_number_of_levels_is_the_data_sets(lab):
    assert levels_of(lab) == 16
    assert levels_of(dataclasses.replace(lab, name="mnist")) == 255


@pytest.mark.torch
def test_a_permutation_hides_no_levels_and_a_rotation_does(lab):
    (clear,), (permuted,), (rotated,) = (run(lab, mode) for mode in ("none", "permutation", "rotation"))
    assert permuted.success == pytest.approx(clear.success, abs=0.01)
    assert rotated.success < rotated.chance < permuted.success
