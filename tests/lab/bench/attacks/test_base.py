"""The measures of an attack's success, against figures worked out by hand."""

import dataclasses

import numpy as np
import pytest
from shoal_lab.bench.attacks.base import Picture, Result, auc, balanced_accuracy, cosine, psnr_db, share_recovered


def test_quality_of_an_image_by_hand():
    """A tenth off everywhere is 20 dB; exact is the cap."""
    assert psnr_db(np.full(4, 0.6), np.full(4, 0.5)) == pytest.approx(20.0)
    assert psnr_db(np.ones(4), np.ones(4)) == 120.0


def test_shares_count_non_zero_coordinates_only():
    truth = np.array([0, 0, 1, 2, 4], np.float32)
    assert share_recovered(np.array([0, 0, 1, 2, 5], np.float32), truth) == pytest.approx(2 / 3)
    assert share_recovered(truth, np.zeros(5, np.float32)) == 0.0


def test_cosine_auc_and_balanced_accuracy_by_hand():
    assert cosine(np.array([1, 0]), np.array([1, 1])) == pytest.approx(2**-0.5)
    assert cosine(np.zeros(2), np.ones(2)) == 0.0
    assert auc([3, 2], [1, 2]) == pytest.approx(3.5 / 4)
    assert balanced_accuracy(np.array([0, 0, 0, 0]), np.array([0, 0, 0, 1])) == 0.5


def test_an_attack_works_only_beyond_its_margin():
    result = Result(name="x", attacker="y", success=0.6, chance=0.5, unit="share", margin=0.1)
    assert not result.works
    assert dataclasses.replace(result, success=0.61).works


def test_a_small_error_in_one_pixel_counts_as_its_share():
    """One of four pixels is off by one: a mean square of a quarter is 6 dB."""
    assert psnr_db(np.array([1, 0, 0, 0]), np.zeros(4)) == pytest.approx(10 * np.log10(4))
    assert psnr_db(np.array([2.0]), np.array([0.0])) < 0
    assert psnr_db(np.array([1e-9]), np.array([0.0])) == 120.0


def test_a_coordinate_is_recovered_to_a_part_in_1000():
    truth = np.array([1.0, -1.0, 1.0])
    assert share_recovered(np.array([1.0009, -1.0009, 1.1]), truth) == pytest.approx(2 / 3)
    assert share_recovered(np.array([1.0, 1.0, 1.0]), truth) == pytest.approx(2 / 3)


def test_an_auc_of_scores_in_the_wrong_order_is_zero():
    assert auc([1, 2], [3, 4]) == 0.0
    assert auc([3, 4], [1, 2]) == 1.0
    assert auc([1, 1], [1, 1]) == 0.5


def test_balanced_accuracy_counts_each_class_alike():
    """Nine of nine and none of one are a half; a class that is only guessed does not count."""
    truth = np.array([0] * 9 + [1])
    assert balanced_accuracy(np.zeros(10, np.int64), truth) == 0.5
    assert balanced_accuracy(np.array([0] * 9 + [7]), truth) == 0.5
    assert balanced_accuracy(truth, truth) == 1.0


def test_the_figures_of_a_result_leave_out_its_pictures():
    picture = Picture("true", np.zeros((2, 2), np.float32))
    result = Result(name="x", attacker="y", success=20.0, chance=10.0, unit="dB", note="z", pictures=(picture,))
    assert result.data() == {
        "name": "x",
        "attacker": "y",
        "success": 20.0,
        "chance": 10.0,
        "unit": "dB",
        "works": True,
        "note": "z",
        "keys": "run",
        "devices": 1,
    }
