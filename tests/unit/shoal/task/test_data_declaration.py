"""The declaration of a task's data: what it may say, and the manifest that carries it.

Categories and times of a table's columns become values of a sample.
"""

from __future__ import annotations

import dataclasses

import pytest

from shoal.errors import DataError, TaskError
from shoal.task import data_declaration
from shoal.task.data_declaration import NO_DECLARATION, DataDeclaration, features_of, names_of, values_of
from shoal.task.manifest import TaskManifest, TensorSpec, statistics_length
from tests.helpers.refusals import refused
from tests.helpers.tasks import logistic_bundle, manifest

BOUNDED = DataDeclaration(
    features=("a", "b", "c", 'the "d", µ'),
    low=(0, -1, 0, 0),
    high=(1, 1, 1e3, 5),
    label="y",
    labels=("no", "perhaps", "yes"),
    standardise="local",
    missing="mean",
)


def test_manifest_carries_it_exactly():
    """A bundle with a declaration is another task; tasks without one are as before. Classes have the numbers of their places."""
    declared = manifest(data=BOUNDED)
    text = declared.to_toml()
    assert '[data]\nfeatures = ["a", "b", "c", "the \\"d\\", µ"]\nlow = [0.0, -1.0, 0.0, 0.0]' in text
    again = TaskManifest.from_toml(text.encode())
    assert (again, again.to_toml()) == (declared, text)
    assert "[data]" not in manifest().to_toml()
    assert TaskManifest.from_toml(manifest().to_toml().encode()).data == NO_DECLARATION
    plain, bundle = logistic_bundle(), logistic_bundle(data=BOUNDED)
    assert bundle.digest != plain.digest
    assert type(plain).from_bytes(bundle.to_bytes()) == bundle
    assert [BOUNDED.class_of(name) for name in ("no", "yes", "never")] == [0, 2, None]
    assert (bool(BOUNDED.low), NO_DECLARATION.low) == (True, ())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"features": ("a", "a", "b", "c")}, "two feature columns are named 'a'"),
        ({"labels": ("no", "no", "yes")}, "label 'no' occurs twice"),
        ({"features": ("a", "", "b", "c")}, "feature name '' is not valid"),
        ({"features": ("a", " b", "c", "d")}, "feature name ' b' is not valid"),
        ({"features": ("a", "b\n", "c", "d")}, "is not valid"),
        ({"labels": ("x" * 101, "b", "c")}, "is not valid"),
        ({"label": "a"}, "column 'a' is a feature and the label"),
        ({"low": (0, 0, 0, 2), "high": (1, 1, 1, 1)}, "has the bounds 2 and 1"),
        ({"low": (0, 0, 0, float("nan"))}, "has the bounds nan and 5"),
        ({"high": (1, 1, 1, 1e31)}, r"has the bounds 0 and 1e\+31"),
        ({"low": (0, 0)}, "a lower and an upper bound, or none"),
        ({"low": (0, 0), "high": (1, 1)}, "a lower and an upper bound, or none"),
        ({"low": (), "high": (), "standardise": "federated"}, "needs the bounds of every feature"),
        ({"standardise": "off"}, "only if the task standardises"),
        ({"standardise": "global"}, "standardise is one of off, local, federated, not 'global'"),
        ({"missing": "skip"}, "missing is one of error, mean, not 'skip'"),
    ],
)
def test_contradictory_declaration(changes, message):
    """A declaration that contradicts itself is refused."""
    with pytest.raises(TaskError, match=message):
        dataclasses.replace(BOUNDED, **changes)


def test_names_are_limited(monkeypatch):
    monkeypatch.setattr(data_declaration, "MAX_NAMES_BYTES", 3)
    DataDeclaration(features=("a", "b", "c"))
    with pytest.raises(TaskError, match="more than 3 bytes"):
        DataDeclaration(features=("a", "b", "µ"))
    monkeypatch.setattr(data_declaration, "MAX_NAMES", 1)
    with pytest.raises(TaskError, match="2 names of a feature, more than 1"):
        DataDeclaration(features=("a", "b"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"data": DataDeclaration(features=("a",))}, "declares 1 features, and a sample has 4 values"),
        (
            {"data": DataDeclaration(labels=("a", "b"))},
            "declares 2 labels, and a classification model of this size has 3",
        ),
        (
            {"data": DataDeclaration(standardise="local"), "input": TensorSpec((4,), "int64", 9)},
            "samples of whole numbers can't be standardised",
        ),
        (
            {"kind": "regression", "label": TensorSpec((), "float32"), "data": DataDeclaration(labels=("a", "b", "c"))},
            "no named classes",
        ),
        ({"data": DataDeclaration(target=(0, 1))}, "a classification task has no range of targets"),
    ],
)
def test_a_declaration_must_fit_the_model(changes, message):
    with pytest.raises(TaskError, match=message):
        manifest(**changes)


@pytest.mark.parametrize("target", [(1.0,), (2.0, 1.0), (0.0, float("inf")), (float("nan"), 1.0), (1.0, 1.0)])
def test_range_is_two_numbers_in_order(target):
    """A range of targets is two numbers in order."""
    with refused(TaskError, "the range of targets is", hint="the first below the second"):
        DataDeclaration(target=target)


def test_manifest_carries_the_range():
    """A manifest carries the range of targets where there is one."""
    label = TensorSpec((), "float32")
    ranged = manifest(kind="regression", label=label, data=DataDeclaration(label="y", target=(-2, 6)))
    assert ranged.data.target_scale == (2.0, 2.0)
    assert TaskManifest.from_toml(ranged.to_toml().encode()) == ranged
    without = manifest(kind="regression", label=label, data=DataDeclaration(label="y"))
    assert without.data.target_scale == (0.0, 1.0)
    assert "target" not in without.to_toml(), "tasks without one keep their bytes, and so their digest"
    assert TaskManifest.from_toml(without.to_toml().encode()) == without


def test_statistics_must_fit_the_vector():
    """Federated statistics must fit the vector."""
    data = dataclasses.replace(BOUNDED, standardise="federated")
    assert statistics_length(4) == 9
    manifest(data=data)
    one = dataclasses.replace(data, labels=())
    with refused(TaskError, "4 features needs 9 coordinates, and devices upload 8", hint="--standardise local"):
        manifest(classes=3, data=one, parameters=(manifest().parameters[0].__class__("w", (4, 2), "cluster"),))


STATE = ("state", "categories", "on", "off")
SOURCES = (("temp",), STATE, ("at", "hour"), ("at", "weekday"))


def test_each_kind_has_names():
    assert names_of(("temp",)) == ("temp",)
    assert names_of(STATE) == ("state=on", "state=off", "state: other")
    assert names_of(("at", "hour")) == ("at: hour, sine", "at: hour, cosine")
    assert len(names_of(("at", "weekday"))) == 7


@pytest.mark.parametrize(
    "source",
    [("a", "minute"), ("a", "hour", "b"), ("a", "categories"), ("a", "categories", "b", "b"), ("a", "categories", "")],
)
def test_other_kinds_are_refused(source):
    with pytest.raises(TaskError, match="column 'a' is declared as"):
        names_of(source)


@pytest.mark.parametrize(
    ("cell", "found"), [("on", (1, 0, 0)), (" off ", (0, 1, 0)), ("ON", (0, 0, 1)), ("x", (0, 0, 1))]
)
def test_an_unseen_category_has_a_value(cell, found):
    assert values_of(STATE, cell) == found


@pytest.mark.parametrize("cell", ["2026-11-28 18:00", "2026-11-28T18:00:00+02:00", "1795888800"])
def test_hour_and_weekday_of_a_time(cell):
    sine, cosine = values_of(("at", "hour"), cell)
    assert (sine, cosine) == pytest.approx((-1, 0), abs=1e-9)
    assert values_of(("at", "weekday"), cell).index(1) == 5, "a Saturday"


@pytest.mark.parametrize("cell", ["28.11.2026", "noon", "1e30", "inf", "nan"])
def test_what_is_no_time_is_refused(cell):
    with refused(DataError, "is no time", hint="2026-11-28 14:30"):
        values_of(("at", "hour"), cell)


def test_features_are_those_of_its_columns():
    """And a manifest keeps them."""
    names = features_of(SOURCES)
    data = DataDeclaration(features=names, sources=SOURCES)
    assert (data.columns, len(names)) == (SOURCES, 13)
    assert TaskManifest.from_toml(manifest(13, 2, data=data).to_toml().encode()).data == data
    assert DataDeclaration(features=("a", "b")).columns == (("a",), ("b",))
    with pytest.raises(TaskError, match="not those of the declared columns"):
        DataDeclaration(features=names[1:], sources=SOURCES)
    with pytest.raises(TaskError, match="a feature and the label"):
        DataDeclaration(features=names, sources=SOURCES, label="state")
