"""The declaration of data from the options of `task compile`."""

from __future__ import annotations

import pytest

from shoal.errors import TaskError
from shoal.owner.task_compiler import features
from shoal.owner.task_compiler.features import declare
from shoal.task.data_declaration import NO_DECLARATION
from tests.helpers.refusals import refused


def test_names_with_commas_between():
    """A list may be longer than the name of a file; the range of targets is two numbers."""
    made = declare(features='radius, area ,"a, b"', label="diagnosis", labels="benign,malignant")
    assert made.features == ("radius", "area", "a, b")
    assert (made.label, made.labels) == ("diagnosis", ("benign", "malignant"))
    assert (made.standardise, made.missing, made.low) == ("local", "error", ())
    assert declare() == NO_DECLARATION
    names = [f"concave points {i} worst / mean" for i in range(300)]
    assert declare(features=",".join(names)).features == tuple(names)
    assert declare(target="-5, 1e3").target == (-5.0, 1000.0)
    for text in ("low,high", "1"):
        with pytest.raises(TaskError, match="range of targets"):
            declare(target=text)


def test_file_has_a_line_for_each(tmp_path):
    """A file has a line for each and bounds standardise with the fleet."""
    path = tmp_path / "features.txt"
    path.write_text('# the table of 2026\nradius,0,50\n\n"area, mm2",0,5e3\n')
    made = declare(features=str(path))
    assert (made.features, made.low, made.high) == (("radius", "area, mm2"), (0.0, 0.0), (50.0, 5000.0))
    assert made.standardise == "federated"
    assert declare(features=str(path), standardise="off").standardise == "off"


@pytest.mark.parametrize(("count", "chosen"), [(255, "federated"), (256, "local")])
def test_many_features_stay_local(tmp_path, count, chosen):
    """More features than a device hides are standardised locally."""
    path = tmp_path / "features.txt"
    path.write_text("".join(f"f{i},0,1\n" for i in range(count)))
    assert declare(features=str(path)).standardise == chosen
    if chosen == "local":
        with refused(TaskError, "of 256 features are more than a device can hide", hint="--standardise local"):
            declare(features=str(path), standardise="federated")


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        ("radius,0\n", "line 1: column 'radius' is declared as '0'", ""),
        ("radius,0,50\narea\n", "feature 'area' has no bounds, and others have", ""),
        ("radius,0,wide\n", "a bound of a feature is no number", ""),
        ("radius,3,1\n", "has the bounds 3 and 1", ""),
        ("# nothing\n", "names no feature", ""),
        ("\xff", "can't be read", ""),
        ("temp\nstate,categories\n", "line 2: column", "NAME,categories,VALUE"),
        ("temp\nat,minute\n", "line 2: column", "NAME,categories,VALUE"),
        ("temp\nat,hour,1,2\n", "line 2: column", "NAME,categories,VALUE"),
    ],
)
def test_other_contents_are_refused(tmp_path, text, message, hint):
    """A file that says something else is refused."""
    path = tmp_path / "features.txt"
    path.write_bytes(text.encode("latin-1"))
    with refused(TaskError, message, hint=hint):
        declare(features=str(path))


def test_missing_or_long_file_is_refused(tmp_path, monkeypatch):
    """A file that is missing or too long is refused."""
    with pytest.raises(TaskError, match="can't be read"):
        declare(features=str(tmp_path / "none.txt"))
    (tmp_path / "f.txt").write_text("a\nb\n")
    monkeypatch.setattr(features, "MAX_FILE_BYTES", 3)
    with pytest.raises(TaskError, match="more than 3 characters"):
        declare(features=str(tmp_path / "f.txt"))


def test_file_declares_categories_and_times(tmp_path):
    file = tmp_path / "f.csv"
    file.write_text("temp,-20,60\nstate,categories,on,off\nat,hour\n")
    data = declare(features=str(file))
    assert data.sources == (("temp",), ("state", "categories", "on", "off"), ("at", "hour"))
    assert (data.low, data.high) == ((-20, 0, 0, 0, -1, -1), (60, 1, 1, 1, 1, 1))
    assert data.standardise == "federated"
