"""task.toml: one text for one manifest, and refusal of everything that does not say exactly that."""

from __future__ import annotations

import pytest

from shoal.errors import TaskError
from shoal.protocol.recipe import LocalTraining
from shoal.task.manifest import MAX_MANIFEST_BYTES, Parameter, TaskManifest, TensorSpec
from tests.helpers.tasks import manifest

TEXT = manifest().to_toml()


def test_round_trip_is_exact():
    """Integer rates become floats so that equal settings have one text."""
    original = manifest(hyper=LocalTraining(3, 7, 32, 1e-5, 0.9, 0.99, 5.0, 1 / 3), segment="shared")
    again = TaskManifest.from_toml(original.to_toml().encode())
    assert (again, again.to_toml()) == (original, original.to_toml())
    assert LocalTraining(lr=1) == LocalTraining(lr=1.0)
    assert repr(LocalTraining(lr=1).lr) == "1.0"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("opset = 20", "opset = 20\nextra = 1", "unknown key 'extra'"),
        ("momentum = 0.0", "momentum = 0.0\nnesterov = true", "unknown key 'hyper.nesterov'"),
        ("opset = 20\n", "", "lacks 'opset'"),
        ("opset = 20", "opset = 20\nopset = 20", "not valid TOML"),
        ("lr = 0.1", "lr = nan", "hyper.lr must be a finite number"),
        ("lr = 0.1", "lr = inf", "hyper.lr must be a finite number"),
        ("lr = 0.1", "lr = true", "hyper.lr must be a finite number"),
        ("lr = 0.1", "lr = -0.1", "lr is a number above 0"),
        ("epochs = 1", "epochs = 1.0", "epochs must be an integer"),
        ("batch_size = 10", "batch_size = true", "batch_size must be an integer"),
        ("format_version = 1", "format_version = 2", "format 2"),
        ('name = "logistic"', 'name = "../up"', "not a valid name"),
        ('kind = "classification"', 'kind = "ranking"', "kind 'ranking'"),
        ('kind = "classification"', "kind = 3", "must be a string"),
        ("limit = 3", "limit = 1", "at least 2 classes"),
        ("shape = [4, 3]", "shape = [4, -3]", "has shape"),
        ("shape = [4, 3]", "shape = [99999, 99999]", "more than"),
        ("shape = [4, 3]", "shape = 4", "a list"),
        ("shape = [4, 3]", f"shape = {[1] * 9}", "up to 8"),
        ('name = "bias"', 'name = "weight"', "same name"),
        ('name = "bias"', 'name = "bi as"', "not valid"),
        ('segment = "cluster"', 'segment = "layer"', "segment 'layer'"),
        ("[input]", "[input]\nscale = 1", "unknown key 'input.scale'"),
        ('score = "0', 'score = "z', "64 lower-case hex"),
    ],
)
def test_each_malformation_is_refused(old, new, message):
    assert old in TEXT
    with pytest.raises(TaskError, match=message):
        TaskManifest.from_toml(TEXT.replace(old, new, 1).encode())


def test_text_oversize_and_nesting_refused():
    """Bytes that are no text oversize and deep nesting are refused."""
    for data in (b"\xff\xfe", b"a" * (MAX_MANIFEST_BYTES + 1), b"a = " + b"[" * 100_000, b"a = " + b"9" * 10_000):
        with pytest.raises(TaskError):
            TaskManifest.from_toml(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"parameters": (Parameter("a", (2,), "cluster"), Parameter("b", (2,), "shared"))},
            "order of their segments",
        ),
        ({"parameters": ()}, "1 to 4096"),
        ({"parameters": tuple(Parameter(f"p{i}", (1 << 27,), "cluster") for i in range(3))}, "coordinates"),
        ({"kind": "regression"}, "regression task needs float32"),
        ({"kind": "sequence"}, "rank 1"),
    ],
    ids=["shared after cluster", "no parameter", "too many", "a regression's label", "a sequence's label"],
)
def test_senseless_manifest_is_refused(changes, message):
    """The label's contract follows the kind."""
    with pytest.raises(TaskError, match=message):
        manifest(**changes)
    assert manifest(kind="regression", label=TensorSpec((), "float32")).label.limit == 0


def test_private_parameters_come_last():
    """Private parameters come last and are never all."""
    order = (Parameter("a", (2,), "private"), Parameter("b", (2,), "cluster"))
    with pytest.raises(TaskError, match="order of their segments"):
        manifest(parameters=order)
    with pytest.raises(TaskError, match="every parameter"):
        manifest(parameters=order[:1])
    found = manifest(parameters=order[::-1])
    assert TaskManifest.from_toml(found.to_toml().encode()) == found
