"""Counts of labels, read from the gradient of the last bias: mean(p) - counts / n."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.lab import CLASSES
from shoal_lab.bench.attacks.label_counts import BATCH, estimate, overlap, run

UNIFORM = np.full(CLASSES, 0.1)


def gradient_of(counts, mean_p=UNIFORM):
    """Return a gradient (d,) of a batch with these counts under mean outputs ``mean_p``; other layers come before."""
    return np.concatenate([np.full(20, 99.0), mean_p - np.array(counts) / BATCH]).astype(np.float32)


def test_counts_of_a_clear_gradient_are_exact():
    counts = [8, 0, 0, 24, 0, 0, 0, 0, 0, 0]
    np.testing.assert_allclose(estimate(gradient_of(counts), UNIFORM), counts, atol=1e-4)
    skewed = np.array([0.4, 0.3, 0.3, *[0.0] * 7])
    np.testing.assert_allclose(estimate(gradient_of(counts, skewed), skewed), counts, atol=1e-4)


def test_estimates_are_no_less_than_zero_and_add_up_to_the_batch():
    found = estimate(gradient_of([40, -8, 0, 0, 0, 0, 0, 0, 0, 0]), UNIFORM)
    assert found.min() == 0
    assert found.sum() == pytest.approx(BATCH)
    assert found[0] == pytest.approx(BATCH)


def test_a_gradient_that_shows_no_label_is_guessed_evenly():
    nothing = np.concatenate([np.zeros(5), np.full(CLASSES, 5.0)]).astype(np.float32)
    assert estimate(nothing, UNIFORM).tolist() == [BATCH / CLASSES] * CLASSES


def test_the_overlap_is_the_share_of_labels_in_common():
    truth = np.array([16, 16, 0, 0, 0, 0, 0, 0, 0, 0])
    assert overlap(truth.astype(float), truth) == 1.0
    assert overlap(np.roll(truth, 2).astype(float), truth) == 0.0
    assert overlap(np.array([16.4, 8, 8, 0, 0, 0, 0, 0, 0, 0]), truth) == 0.75


@pytest.mark.torch
def test_labels_are_counted_without_a_mask_and_guessed_under_one(lab):
    (clear,), (masked,) = run(lab, "none"), run(lab, "rotation")
    assert clear.success > 0.9
    assert clear.chance == masked.chance < 0.7
    assert masked.success < masked.chance + 0.1
