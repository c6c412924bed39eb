"""The readers of tables: columns by name and position, separators, labels of text, missing values, and tables that are none."""

from __future__ import annotations

import contextlib
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_client.learning import tables
from edge_client.learning.data import load, load_inputs
from edge_client.learning.tables import TableSpec, columns_of, read_csv, read_parquet
from shoal.errors import DataError, ShoalError
from shoal.task.data_declaration import DataDeclaration, features_of
from tests.helpers.tasks import manifest

NAMED = DataDeclaration(features=("radius", "area"), label="diagnosis", labels=("benign", "malignant"))
SPEC = TableSpec(2, NAMED)
BARE = TableSpec(2)
TWO, HALVES = [[1, 2], [3, 4]], [[1.5, 2.5], [3.5, 4.5]]
HEAD = "radius,area,diagnosis\n"


def table(folder, text, spec=BARE):
    path = folder / "d.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_csv(path, spec)


@pytest.mark.parametrize(
    ("text", "spec", "x", "y"),
    [
        pytest.param("1,2,0\n3,4,1\n", BARE, TWO, [0, 1], id="bare"),
        pytest.param("a,b,c\n1,2,0\n3,4,1\n", BARE, TWO, [0, 1], id="header"),
        pytest.param("a, LABEL ,b\n1,0,2\n3,1,4\n", BARE, TWO, [0, 1], id="label column"),
        pytest.param("label,a,b\r\n0,1,2\r\n1,3,4\r\n", BARE, TWO, [0, 1], id="label first"),
        pytest.param("\ufeff1,2,0\n\n  \n3,4,1", BARE, TWO, [0, 1], id="empty lines and a mark"),
        pytest.param('"1","2",0\n3e0,+4,1\n', BARE, TWO, [0, 1], id="quotes"),
        pytest.param("1,2,benign\n3,4,malignant\n", SPEC, TWO, [0, 1], id="the task's columns without a header"),
        pytest.param(
            "radius,area,diagnosis\n1,2,Benign\n3,4,MALIGNANT\n", SPEC, TWO, [0, 1], id="labels of another case"
        ),
        pytest.param(
            "truth,radius,area,diagnosis\nmalignant,1,2,benign\n",
            TableSpec(2, NAMED, label="Truth"),
            [[1, 2]],
            [1],
            id="the device's label column comes first",
        ),
        pytest.param(
            "grade,radius,area\n3,1,2\n",
            TableSpec(2, DataDeclaration(features=("radius", "area"))),
            [[1, 2]],
            [3],
            id="the one other column is the label",
        ),
        *(
            pytest.param(text.format(separator), SPEC, TWO, [0, 1], id=f"separator {separator!r}")
            for separator in (";", "\t", "|", ",")
            for text in (
                "1{0}2{0}benign\n3{0}4{0}malignant\n",
                "radius{0}area{0}diagnosis\n1{0}2{0}benign\n3{0}4{0}malignant\n",
            )
        ),
        pytest.param("1:2:0\n3:4:1\n", TableSpec(2, separator=":"), TWO, [0, 1], id="a given separator"),
        pytest.param(
            "# logger v2\n# site 3, hall 4\na,b,label\n1,2,0\n# pause\n3,4,1\n", BARE, TWO, [0, 1], id="comments"
        ),
        pytest.param("# a,b,label\n1,2,0\n3,4,1\n", BARE, TWO, [0, 1], id="commented header"),
        pytest.param("Export of 2026\n\na,b,label\n1,2,0\n3,4,1\n", BARE, TWO, [0, 1], id="a title is no header"),
        pytest.param("sep=;\na;b;label\n1;2;0\n3;4;1\n", BARE, TWO, [0, 1], id="sep"),
        pytest.param('"sep=|"\r\n1|2|0\r\n3|4|1\r\n', BARE, TWO, [0, 1], id="quoted sep"),
        pytest.param("a;b;label\n1,5;-2;0\n3;,25;1\n", BARE, [[1.5, -2], [3, 0.25]], [0, 1], id="decimal comma"),
        pytest.param("1,5;2,5;0\n3,5;4,5;1\n", BARE, HALVES, [0, 1], id="decimal commas make no columns"),
        pytest.param("a;b;label\n1,5;2,5;0\n3,5;4,5;1\n", BARE, HALVES, [0, 1], id="nor below a header"),
        pytest.param("a\tb\tlabel\n1,5\t2\t0\n3\t4\t1\n", BARE, [[1.5, 2], [3, 4]], [0, 1], id="tab"),
        pytest.param("a,b,label\n1,2,0\n3,4,1\n".encode("utf-16"), BARE, TWO, [0, 1], id="utf-16"),
    ],
)
def test_a_table_has_features_and_a_label(tmp_path, text, spec, x, y):
    raw = table(tmp_path, text, spec)
    assert (raw.x.tolist(), raw.y.tolist()) == (x, y)
    assert raw.x.dtype == np.float64


def test_rows_are_named_by_their_lines(tmp_path):
    """Rows are named by their lines in the file."""
    raw = table(tmp_path, 'a,b\n\n1,0\n"2\n",1\n3,0\n')
    assert [raw.row_name(i) for i in range(3)] == ["line 3", "line 5", "line 6"]


# ------------------------------------------------------------------------------------------------------------ names


@pytest.mark.parametrize(
    ("header", "spec", "message", "hint"),
    [
        ("radius,diagnosis", SPEC, "has no column 'area', which the task takes", "its columns are: radius, diagnosis"),
        ("radius,area,area,diagnosis", SPEC, "has 2 columns named 'area'", "rename"),
        ("radius,area,grade,id", SPEC, "has no column 'diagnosis'", "columns that are no feature: grade, id"),
        ("a,b,c", TableSpec(2, label="grade"), "has no column 'grade'", "--label"),
    ],
)
def test_missing_columns_are_refused(tmp_path, header, spec, message, hint):
    """Columns that are missing or named twice are refused."""
    with pytest.raises(DataError, match=message) as caught:
        columns_of(header.split(","), header.count(",") + 1, spec, tmp_path)
    assert hint in caught.value.hint


@pytest.mark.parametrize(
    ("text", "spec", "message", "hint"),
    [
        (
            "1,2,3,benign\n",
            SPEC,
            "has 4 columns and no header with their names; the task takes 2 features and a label",
            "",
        ),
        ("1,2,3\n", TableSpec(2, label="grade"), "has no header, so it has no column 'grade'", ""),
        (
            f"{HEAD}1,2,unsure\n",
            SPEC,
            "line 2, column 3: 'unsure' is no label of the task",
            "labels: benign, malignant",
        ),
        (f"{HEAD}1,2,\n", SPEC, "line 2, column 3: '' is no label of the task", "benign"),
        (f"{HEAD}1,2,1\n", SPEC, "line 2, column 3: '1' is no label of the task", "benign"),
        (f'{HEAD}1,"2,5",benign\n', SPEC, "line 2, column 2: '2,5' is not a number", "decimal point"),
        (f"{HEAD}1,two,benign\n", SPEC, "line 2, column 2: 'two' is not a number", "leave the cell empty"),
        (
            "a,label\n1,Ok\n",
            TableSpec(1, DataDeclaration(features=("a",), labels=("ok", "OK"))),
            "'Ok' is no label",
            "",
        ),
        ("1,2,0\n1,2,cat\n", BARE, "'cat' is not a number", "--labels"),
        (
            "1,0\n1," + "y" * 50 + "\n",
            TableSpec(1),
            f"d.csv, line 2, column 2: '{'y' * 40}' is not a number",
            "--labels",
        ),
        (b"\xff\xfe\x00", BARE, r"d\.csv can't be read as CSV: ", ""),
        (b'"' + b"1" * 200_000 + b'"', BARE, r"d\.csv can't be read as CSV: ", ""),
        (b"PK\3\4 a workbook", BARE, "zip file or a workbook", ""),
        ("a,label\n".encode("utf-16-le"), BARE, "UTF-16 without", ""),
        ("a".encode("utf-32"), BARE, "UTF-32", ""),
        ("1,2,NA\n", BARE, "'NA' is no label", ""),
        *(
            (f"a;b;label\n2.5;{cell};0\n", BARE, "is not a number", hint)
            for cell, hint in (
                ("1,000.5", "without a mark between thousands"),
                ("1\u202f000.5", "without a mark between thousands"),
                ("26.1C", "the number alone, without 'C'"),
                ("50 %", "the number alone, without '%'"),
                ("$5", "the number alone, without '$'"),
                ("high", "leave the cell empty"),
                ("1,5", 'write numbers with a decimal point, or give the setting decimal = ","'),
            )
        ),
        ("1:2:0\n", BARE, "has one column", "separator"),
        # By the likely separator.
        ("1;2;0\n1;2\n", BARE, "line 2: 2 columns instead of 3", ""),
    ],
)
def test_what_fits_nothing_has_a_hint(tmp_path, text, spec, message, hint):
    with pytest.raises(DataError, match=message) as caught:
        table(tmp_path, text, spec)
    assert hint in (caught.value.hint or "")


@pytest.mark.parametrize(
    ("text", "x"),
    [
        ("1,2\n", [[1, 2]]),
        ("1,2,0\n", [[1, 2]]),
        ("a,label\n1,2\n", [[1, 2]]),
        ("label,a,b\n0,1,2\n", [[1, 2]]),
        ("a,b,c\n1,2,nonsense\n", [[1, 2]]),
    ],
)
def test_labels_may_be_absent_if_unneeded(tmp_path, text, x):
    """Labels may be absent where none are needed."""
    raw = table(tmp_path, text, TableSpec(2, labelled=False))
    assert (raw.x.tolist(), len(raw.y)) == (x, 0)


# ------------------------------------------------------------------------------------------------------------ cells


@pytest.mark.parametrize("cell", ["", " ", "NA", "nan", "N/A", "null", "None", "?"])
def test_missing_value_is_nan(tmp_path, cell):
    """A missing value is nan here and the task decides."""
    raw = table(tmp_path, f"radius,area,diagnosis\n1,{cell},benign\n", SPEC)
    np.testing.assert_array_equal(raw.x, [[1, np.nan]])
    task = manifest(2, 2, data=NAMED)
    with pytest.raises(DataError, match=r"d\.csv, line 2, column 'area': the value is missing") as caught:
        load(tmp_path / "d.csv", task)
    assert "--missing mean" in caught.value.hint
    filled = manifest(2, 2, data=DataDeclaration(labels=NAMED.labels, standardise="local", missing="mean"))
    np.testing.assert_array_equal(load(tmp_path / "d.csv", filled).x, np.array([[1, np.nan]], np.float32))


# -------------------------------------------------------------------------------------------------------- separators


SOURCES = (("state", "categories", "on", "off"), ("temp",), ("at", "hour"))
DERIVED = TableSpec(6, DataDeclaration(features=features_of(SOURCES), sources=SOURCES))


@pytest.mark.parametrize("header", ["label,at,temp,state\n", ""], ids=["names", "positions"])
def test_categories_and_times_become_values(tmp_path, header):
    rows = "1,2026-11-28 06:00,3.5,off\n0,2026-11-28 00:00,4,broken\n" if header else "off,3.5,2026-11-28 06:00,1\n"
    raw = table(tmp_path, header + rows, DERIVED)
    np.testing.assert_allclose(raw.x[0], [0, 1, 0, 3.5, 1, 0], atol=1e-9)
    assert not header or raw.x[1].tolist() == [0, 0, 1, 4, 0, 1]
    assert raw.column_name(2) == "column 'state: other'"


def test_missing_category_or_time_is_missing(tmp_path):
    raw = table(tmp_path, "label,at,temp,state\n1,NA,3.5,\n", DERIVED)
    np.testing.assert_array_equal(raw.x, [[np.nan, np.nan, np.nan, 3.5, np.nan, np.nan]])
    with pytest.raises(DataError, match="line 2, column 2: 'noon' is no time") as caught:
        table(tmp_path, "label,at,temp,state\n1,noon,3.5,on\n", DERIVED)
    assert "seconds since 1970" in caught.value.hint


# ------------------------------------------------------------------------------------------------------------ limits


def test_a_table_and_a_line_have_limits(tmp_path, monkeypatch):
    monkeypatch.setattr(tables, "MAX_TABLE_VALUES", 4)
    table(tmp_path, "1,2,0\n1,2,0\n")
    with pytest.raises(DataError, match="line 3: the table has more than 4 numbers"):
        table(tmp_path, "1,2,0\n1,2,0\n1,2,0\n")
    monkeypatch.setattr(tables, "MAX_LINE_CHARS", 10)
    with pytest.raises(DataError, match="a line of more than 10 characters"):
        table(tmp_path, "1,2,0\n1,2,00000000000000000\n")


# ------------------------------------------------------------------------------------------------------------ random


CELLS = st.one_of(
    st.floats(allow_nan=False, width=32).map(repr),
    st.sampled_from(["", "NA", "benign", "malignant", "radius", '"', "1,5", "\ufeff", "\0", "1e999", "٣"]),
    st.text(max_size=8),
)


@pytest.mark.slow
@given(
    rows=st.lists(st.lists(CELLS, min_size=1, max_size=5), max_size=6),
    separator=st.sampled_from([",", ";", "\t", "|", ":"]),
    named=st.booleans(),
)
def test_any_text_is_a_table_or_a_data_error(tmp_path_factory, rows, separator, named):
    path = tmp_path_factory.mktemp("table") / "d.csv"
    text = "\n".join(separator.join(row) for row in rows)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    spec = SPEC if named else BARE
    with contextlib.suppress(ShoalError):
        check(read_csv(path, spec), named)


def check(raw, named):
    """Check that a table that was read has as many labels as rows, and the task's columns if they are named."""
    assert raw.x.shape == (len(raw.y), len(raw.columns))
    assert len(raw.lines) == len(raw.y) > 0
    if named:
        assert raw.x.shape[1] == 2
        assert set(raw.y.tolist()) <= {0.0, 1.0}


@given(
    values=st.lists(
        st.tuples(*[st.floats(-1e6, 1e6, width=32)] * 2, st.sampled_from(NAMED.labels)), min_size=1, max_size=9
    ),
    order=st.permutations(["radius", "area", "diagnosis", "id"]),
    separator=st.sampled_from([",", ";", "\t", "|"]),
)
def test_written_table_is_read_in_any_order(tmp_path_factory, values, order, separator):
    """A written table is read back in any order of columns."""
    path = tmp_path_factory.mktemp("table") / "d.csv"
    lines = [separator.join(order)]
    for i, (radius, area, label) in enumerate(values):
        cells = {"radius": repr(radius), "area": repr(area), "diagnosis": label, "id": str(i)}
        lines.append(separator.join(cells[name] for name in order))
    path.write_text("\n".join(lines))
    raw = read_csv(path, SPEC)
    assert (raw.columns, raw.column_name(1)) == (("radius", "area"), "column 'area'")
    assert raw.x.tolist() == [[radius, area] for radius, area, _ in values]
    assert raw.y.tolist() == [NAMED.labels.index(label) for _, _, label in values]


# ----------------------------------------------------------------------------------------------------------- parquet


def test_missing_pyarrow_has_a_hint(tmp_path, monkeypatch):
    """A parquet file without pyarrow is refused with a hint."""
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(DataError, match="pyarrow is not installed") as caught:
        read_parquet(tmp_path / "d.parquet", SPEC)
    assert "shoal[parquet]" in caught.value.hint


def parquet_file(path, **columns):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), path)
    return path


def test_parquet_has_the_same_columns(tmp_path):
    """A parquet table has the same columns as text."""
    path = parquet_file(
        tmp_path / "d.parquet", diagnosis=["malignant", "benign"], area=[1001, None], id=["x", "y"], radius=[1.5, 2.5]
    )
    raw = read_parquet(path, SPEC)
    np.testing.assert_array_equal(raw.x, [[1.5, 1001], [2.5, np.nan]])
    assert raw.y.tolist() == [1, 0]
    assert load_inputs(
        parquet_file(tmp_path / "e.parquet", area=[1.0], radius=[2.0]), manifest(2, 2, data=NAMED)
    ).tolist() == [[2, 1]]


def test_unfit_parquet_is_refused(tmp_path, monkeypatch):
    """Parquet tables that do not fit are refused."""
    path = parquet_file(tmp_path / "d.parquet", diagnosis=["odd"], area=[1.0], radius=[1.0])
    with pytest.raises(DataError, match="'odd' is no label"):
        read_parquet(path, SPEC)
    path = parquet_file(tmp_path / "d.parquet", diagnosis=["benign"], area=["big"], radius=[1.0])
    with pytest.raises(DataError, match="column 'area': object values are no numbers"):
        read_parquet(path, SPEC)
    path = parquet_file(tmp_path / "d.parquet", diagnosis=["benign"], area=[1.0], radius=[1.0])
    monkeypatch.setattr(tables, "MAX_TABLE_VALUES", 1)
    with pytest.raises(DataError, match="has more than 1 numbers"):
        read_parquet(path, SPEC)
    path.write_bytes(b"PAR1")
    with pytest.raises(DataError, match="can't be read as Parquet"):
        read_parquet(path, SPEC)
