"""Doubts about a device's samples: each is one sentence that ends with the thing to do."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client.learning.data import Dataset
from edge_client.learning.data_doubts import doubts, no_better_doubt
from shoal.task.data_declaration import DataDeclaration
from shoal.task.manifest import TensorSpec
from tests.helpers.tasks import manifest

NAMES = ("a", "b", "c", "d")
RNG = np.random.default_rng(1)


def dataset(*scales):
    """Return samples whose features have these deviations."""
    x = RNG.standard_normal((40, 4)).astype(np.float32) * np.array(scales, np.float32)
    return Dataset(x, np.arange(40) % 2)


def task(**changes):
    return manifest(data=DataDeclaration(features=NAMES, **changes))


def zeros(spec):
    return Dataset(np.zeros((9, *spec.shape), spec.dtype), np.arange(9) % 2)


PIXELS, SYMBOLS = TensorSpec((1, 2, 2), "float32"), TensorSpec((4,), "int64", 9)


@pytest.mark.parametrize(
    ("samples", "of"),
    [
        (dataset(1, 2, 3, 40), task()),
        # As at the edges of scanned digits, which train well: only a feature of large values upsets the others.
        (dataset(1, 2, 3, 0.001), task()),
        (dataset(1, 1, 0, 1), manifest()),
        (dataset(1, 1, 1e30, 1), task(standardise="local")),
        (dataset(1, 1, 1, 1000), task(standardise="local")),
        (zeros(PIXELS), manifest(input=PIXELS)),
        (zeros(SYMBOLS), manifest(input=SYMBOLS)),
    ],
    ids=["well", "hardly varying", "a black pixel", "huge", "unlike scales", "images", "whole numbers"],
)
def test_samples_that_are_well_have_none(samples, of):
    assert doubts(samples, of) == ()


def test_columns_that_do_not_vary_are_named():
    (found,) = doubts(dataset(1, 0, 1, 0), task())
    assert found == (
        "column 'b', column 'd' have the same value in every sample: a constant column teaches nothing; check the file"
    )


def test_many_columns_are_counted():
    wide = manifest(8, 3, data=DataDeclaration(features=tuple("abcdefgh")))
    x = np.zeros((6, 8), np.float32)
    x[:, 0] = np.arange(6)
    (found,) = doubts(Dataset(x, np.arange(6) % 2), wide)
    assert "column 'f' and 2 more have" in found


@pytest.mark.parametrize(
    ("value", "count", "doubted"), [(-999, 8, True), (99999, 8, True), (-999, 2, False), (-9, 8, False)]
)
def test_a_number_for_missing_values(value, count, doubted):
    samples = dataset(1, 1, 1, 1)
    samples.x[:count, 1] = value
    found = doubts(samples, task(standardise="local"))
    assert [f"column 'b' has {value} in many samples" in text for text in found] == [True] * doubted


def test_a_damaged_number():
    """Beside 1e30, standardisation makes all others the same."""
    samples = dataset(1, 1, 1, 1)
    samples.x[3, 1] = 1e30
    assert "column 'b' has a value over a million times the usual" in doubts(samples, task(standardise="local"))[0]
    samples.x[:, 1] = 1e9 * np.arange(40)
    assert doubts(samples, task(standardise="local")) == ()


def test_most_values_are_no_missing_ones():
    """A pixel at the edge, or an event that is rare: most are 0, and few are large."""
    x = np.zeros((40, 4), np.float32)
    x[:, 1:] = RNG.standard_normal((40, 3))
    x[:2, 0] = 250, 253
    samples = Dataset(x, np.arange(40) % 2)
    assert doubts(samples, task(standardise="local")) == ()
    x[:, 0] = np.where(np.arange(40) < 8, -999, np.arange(40))
    assert "'a' has -999 in many" in doubts(samples, task(standardise="local"))[0]
    assert doubts(samples, manifest())[-1].startswith("the features are unscaled"), "values without names may be pixels"


def test_huge_features():
    (found,) = doubts(dataset(1, 1, 1e30, 1), task())
    assert "values of up to 2e+30" in found or "values of up to 3e+30" in found


def test_labels_of_one_class():
    samples = Dataset(dataset(1, 1, 1, 1).x, np.ones(40, np.int64))
    (found,) = doubts(samples, task(labels=("ok", "bad", "off")))
    assert found.startswith("every sample has the label 'bad'")
    assert doubts(samples, task(standardise="off", labels=()))[0].startswith("every sample has the label 1")


def test_unlike_scales_are_a_doubt():
    """Features of very different size are a doubt unless the task standardises."""
    (found,) = doubts(dataset(1, 1, 1, 1000), task())
    assert found.startswith("the features are unscaled: the deviation of column 'd' is ")
    assert found.endswith("; compile the task with --standardise, or scale the features")


def test_missing_values_are_left_out():
    samples = dataset(1, 1, 1, 1)
    samples.x[0, 0] = np.nan
    assert doubts(samples, task(standardise="local", missing="mean")) == ()
    samples.x[:, 0] = np.nan
    assert doubts(samples, task(standardise="local", missing="mean")) == (
        "column 'a' has no value in any sample: an empty column teaches nothing; check the file",
    )


def test_model_no_better_is_a_doubt():
    """A model no better than the most common label is a doubt."""
    assert no_better_doubt(0.61, 0.6) == ""
    found = no_better_doubt(0.6, 0.6)
    assert "60.0% of the validation share, and the most common label in 60.0%" in found
    assert "shoal-edge doctor --data" in found


@pytest.mark.parametrize(
    ("mean", "deviation", "target", "doubted"),
    [
        (0, 1, (), False),
        (4, 1, (), False),
        (0, 0.01, (), True),
        (4000, 1, (), True),
        (4000, 900, (2000, 6000), False),
        (4000, 900, (0, 1e6), True),
        (4000, 0, (), False),
    ],
)
def test_targets_far_off_are_doubted(mean, deviation, target, doubted):
    """Targets far from the tasks unit are doubted."""
    y = (mean + deviation * np.array([-1, 1] * 20)).astype(np.float32)
    found = doubts(
        Dataset(dataset(1, 1, 1, 1).x, y),
        manifest(kind="regression", label=TensorSpec((), "float32"), data=DataDeclaration(target=target)),
    )
    assert [text[:40] for text in found] == [
        "the targets have the mean 4e+03 and the " if mean > 4 else "the targets have the mean 0 and the devi"
    ] * doubted
