"""Categories and times of a table's columns become values of a sample."""

from __future__ import annotations

import pytest

from shoal.errors import DataError, TaskError
from shoal.task.data_declaration import DataDeclaration, features_of, names_of, values_of
from shoal.task.manifest import TaskManifest
from tests.helpers.tasks import manifest

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
    with pytest.raises(DataError, match="is no time") as caught:
        values_of(("at", "hour"), cell)
    assert "2026-11-28 14:30" in caught.value.hint


def test_features_are_those_of_its_columns():
    """A declarations features are those of its columns."""
    names = features_of(SOURCES)
    data = DataDeclaration(features=names, sources=SOURCES)
    assert (data.columns, len(names)) == (SOURCES, 13)
    assert DataDeclaration(features=("a", "b")).columns == (("a",), ("b",))
    with pytest.raises(TaskError, match="not those of the declared columns"):
        DataDeclaration(features=names[1:], sources=SOURCES)
    with pytest.raises(TaskError, match="a feature and the label"):
        DataDeclaration(features=names, sources=SOURCES, label="state")


def test_a_manifest_keeps_them():
    data = DataDeclaration(features=features_of(SOURCES), sources=SOURCES)
    found = manifest(13, 2, data=data)
    assert TaskManifest.from_toml(found.to_toml().encode()).data == data
