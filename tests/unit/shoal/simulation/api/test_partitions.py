"""Partitions as a caller gives them: conversions, and refusals that name the place and the next step."""

import numpy as np
import pytest

from shoal.errors import DataError, UsageError
from shoal.simulation.api.partitions import check_labels, population_of, require_validation

SPLIT = "shoal.split(x, y, ...) cuts every partition into train, validation and test"


def converted(*partitions, kind="classification", integer_inputs=False):
    return population_of(partitions, kind, integer_inputs=integer_inputs)


def pair(n=2, inputs=3, y=None):
    return np.ones((n, inputs)), np.zeros(n, int) if y is None else y


def test_inputs_become_float32():
    """Inputs become float32 and classes int64; embeddings take whole numbers and regressions floats."""
    population = converted({"train": ([[1, 2], [3, 4]], [True, False])})
    (shard,) = population.train
    assert (shard.x.dtype, shard.y.dtype) == (np.float32, np.int64)
    assert (shard.x.tolist(), shard.y.tolist()) == ([[1, 2], [3, 4]], [1, 0])
    assert (len(population.validation[0]), len(population.test[0])) == (0, 0)
    (words,) = converted({"train": (np.array([[1.0, 2.0]]), [[3.0, 4.0]])}, kind="sequence", integer_inputs=True).train
    assert (words.x.dtype, words.y.dtype) == (np.int64, np.int64)
    (numbers,) = converted({"train": ([[1]], [2])}, kind="regression").train
    assert (numbers.x.dtype, numbers.y.dtype) == (np.float32, np.float32)


def test_devices_stay_in_order():
    """Devices stay in order and keep their shares; an empty one is ([], []), as a caller's own split leaves it."""
    first = {"train": pair(1), "validation": ([], []), "test": pair(4)}
    population = converted(first, {"train": pair(2), "validation": pair(3), "test": None})
    assert [len(s) for s in population.train] == [1, 2]
    assert [len(s) for s in population.validation] == [0, 3]
    assert [len(s) for s in population.test] == [4, 0]


@pytest.mark.parametrize("partitions", [[], {"train": 1}, 3, iter([])])
def test_no_list_of_partitions_is_refused(partitions):
    with pytest.raises(UsageError, match="partitions must be a list of at least one mapping") as caught:
        population_of(partitions, "classification", integer_inputs=False)
    assert caught.value.hint == SPLIT


@pytest.mark.parametrize(
    ("partition", "error", "message", "hint"),
    [
        ([1, 2], UsageError, "partition 1 is not a mapping with a share 'train'", SPLIT),
        ({"test": pair()}, UsageError, "partition 1 is not a mapping with a share 'train'", SPLIT),
        (
            {"train": pair(), "val": pair()},
            UsageError,
            "partition 1 has an unknown share 'val'",
            "shares: train, validation, test",
        ),
        ({"train": pair(0)}, DataError, "partition 1 has no training samples", SPLIT),
        ({"train": None}, DataError, "partition 1 has no training samples", SPLIT),
        ({"train": (1, 2, 3)}, UsageError, "partition 1, train: not a pair of arrays (x, y)", SPLIT),
        ({"train": {"x": 1, "y": 2}}, UsageError, "partition 1, train: not a pair of arrays (x, y)", SPLIT),
        (
            {"train": (np.ones((2, 3)), [0])},
            DataError,
            "partition 1, train: x of shape (2, 3) and y of shape (1,): they need one entry a sample each",
            "",
        ),
        (
            {"train": (1.0, 1)},
            DataError,
            "partition 1, train: x of shape () and y of shape (): they need one entry a sample each",
            "",
        ),
        ({"train": (["a"], [0])}, DataError, "partition 1, train: x holds <U1, not numbers", ""),
        ({"train": (np.ones((1, 3)), [1j])}, DataError, "partition 1, train: y holds complex128, not numbers", ""),
        (
            {"train": (np.full((1, 3), np.inf), [0])},
            DataError,
            "partition 1, train: x holds NaN, infinities or numbers too large for float32",
            "",
        ),
        (
            {"train": (np.full((1, 3), 1e39), [0])},
            DataError,
            "partition 1, train: x holds NaN, infinities or numbers too large for float32",
            "",
        ),
        (
            {"train": (np.ones((1, 3)), [0.5])},
            DataError,
            "partition 1, train: y holds numbers that are not whole",
            "for targets that are numbers give task='regression'",
        ),
        (
            {"train": (np.ones((1, 3)), [np.nan])},
            DataError,
            "partition 1, train: y holds numbers that are not whole",
            "for targets that are numbers give task='regression'",
        ),
        (
            {"train": pair(), "test": pair(inputs=4)},
            DataError,
            "partition 1, test: a sample of x has shape (4,), and in partition 0 (3,)",
            "all devices train one model, so all samples have one shape",
        ),
    ],
)
def test_a_partition_that_is_off_is_named(partition, error, message, hint):
    with pytest.raises(error) as caught:
        converted({"train": pair()}, partition)
    assert (str(caught.value), caught.value.hint) == (message, hint)


@pytest.mark.parametrize(
    ("share", "message"),
    [
        ((np.ones((1, 3)), [1e300]), "partition 0, train: y holds numbers that are not whole"),
        (([[1, 2], [3]], [0, 1]), "partition 0, train: x is no array: "),
    ],
    ids=["a label beyond int64", "rows of different lengths"],
)
def test_what_numpy_warns_of_is_refused(share, message):
    with pytest.raises(DataError, match=message):
        converted({"train": share})


@pytest.mark.parametrize(
    ("kind", "y", "takes"), [("classification", np.zeros((2, 1), int), "(n,)"), ("sequence", [0, 1], "(n, positions)")]
)
def test_labels_of_another_rank_are_refused(kind, y, takes):
    with pytest.raises(DataError) as caught:
        converted({"train": (np.ones((2, 3)), y)}, kind=kind)
    assert str(caught.value) == f"partition 0, train: y has shape {np.shape(y)}, and a {kind} takes {takes}"
    assert caught.value.hint.startswith("y holds the numbers of classes; flatten it with y.ravel()")


def test_fractions_are_no_indices():
    with pytest.raises(DataError, match="partition 0, train: x holds numbers that are not whole") as caught:
        converted({"train": ([[0.5]], [[1]])}, kind="sequence", integer_inputs=True)
    assert caught.value.hint == "a model with embeddings takes indices"


def test_validation_needs_every_share():
    """A strategy that validates needs a share of every device."""
    whole = {"train": pair(), "validation": pair()}
    require_validation(converted(whole, whole), "cfl")
    with pytest.raises(DataError) as caught:
        require_validation(converted(whole, {"train": pair()}), "cfl")
    assert str(caught.value) == "cfl tries splits on devices' validation shares, and partition 1 has none"
    assert caught.value.hint == f"{SPLIT}; or set validate to off, which trusts every split"


@pytest.mark.parametrize(("label", "fits"), [(-1, False), (0, True), (2, True), (3, False)])
@pytest.mark.parametrize("share", ["train", "validation", "test"])
def test_labels_are_those_of_models_outputs(label, fits, share):
    population = converted({"train": pair()}, {"train": pair(), share: pair(y=[1, label])})
    if fits:
        check_labels(population, 3)
        return
    with pytest.raises(DataError) as caught:
        check_labels(population, 3)
    assert str(caught.value) == f"partition 1, {share}: label {label} is out of range: the model has 3 outputs"
    assert caught.value.hint == "labels are 0 to 2; give the model an output for each class"
