"""The measures of an attack's success, against figures worked out by hand."""

import dataclasses

import numpy as np
import pytest
from shoal_lab.bench.attacks.base import Picture, Result, auc, balanced_accuracy, cosine, psnr_db, share_recovered


@pytest.mark.parametrize(
    ("image", "truth", "expected"),
    [
        ([0.6] * 4, [0.5] * 4, 20.0),
        ([1, 0, 0, 0], [0, 0, 0, 0], 10 * np.log10(4)),
        ([1.0], [1.0], 120.0),
        ([1e-9], [0.0], 120.0),
    ],
)
def test_psnr(image, truth, expected):
    """A tenth off everywhere is 20 dB; one of four pixels off by one is 6; exact is the cap."""
    assert psnr_db(np.array(image), np.array(truth)) == pytest.approx(expected)


def test_share_recovered():
    """To a part in 1000, of the coordinates that are not zero."""
    truth = np.array([0, 0, 1, 2, 4], np.float32)
    assert share_recovered(np.array([0, 0, 1.0009, 2, 5], np.float32), truth) == pytest.approx(2 / 3)
    assert share_recovered(-truth, truth) == 0.0
    assert share_recovered(truth, np.zeros(5, np.float32)) == 0.0


def test_cosine_and_auc():
    assert cosine(np.array([1, 0]), np.array([1, 1])) == pytest.approx(2**-0.5)
    assert cosine(np.zeros(2), np.ones(2)) == 0.0
    assert auc([3, 2], [1, 2]) == pytest.approx(3.5 / 4)
    assert auc([1, 2], [3, 4]) == 0.0


def test_balanced_accuracy_is_by_class():
    """Nine of nine and none of one are a half; a class that is only guessed does not count."""
    truth = np.array([0] * 9 + [1])
    assert balanced_accuracy(np.zeros(10, np.int64), truth) == 0.5
    assert balanced_accuracy(np.array([0] * 9 + [7]), truth) == 0.5


def test_a_result_works_beyond_its_margin():
    """Its figures as JSON leave out the pictures."""
    picture = Picture("true", np.zeros((2, 2), np.float32))
    result = Result(
        name="x", attacker="y", success=0.6, chance=0.5, unit="share", margin=0.1, note="z", pictures=(picture,)
    )
    assert result.data() == {
        "name": "x",
        "attacker": "y",
        "success": 0.6,
        "chance": 0.5,
        "unit": "share",
        "works": False,
        "note": "z",
        "keys": "run",
        "devices": 1,
    }
    assert dataclasses.replace(result, success=0.61).works
