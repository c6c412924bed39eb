"""Readers of tables: CSV with any separator, and Parquet. Columns are found by name, or by position without a header.

The task names the features and the classes (`shoal.task.data_declaration`); the device's configuration may name the label
column and the separator. For a task that names no features, the label is the column ``label`` or the last one, and every
other column is a feature.

Example: a task with the features ``radius`` and ``area`` and the labels ``benign`` and ``malignant`` reads this file, and
ignores ``id``:

    id;area;diagnosis;radius
    842302;1001;malignant;17.99
    8510426;566.3;benign;13.54
"""

from __future__ import annotations

import codecs
import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TextIO

import numpy as np

from edge_client.learning.data_files import Raw
from edge_client.learning.reading import STRICT, Damage, NoSampleError
from shoal.errors import DataError
from shoal.task.data_declaration import NO_DECLARATION, DataDeclaration, Source, names_of, values_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_TABLE_VALUES: Final = 1 << 27
"""Most numbers of one table: 1 GiB as float64."""

MAX_LINE_CHARS: Final = 1 << 24
"""Longest line of a text table: bounds the memory that a file without line ends can make us reserve."""

SNIFFED_LINES: Final = 20
"""Lines by which the separator is found."""

SEPARATORS: Final = (";", "\t", "|", ",")
"""Separators that are found by themselves, in order: a comma may also be part of a number."""

DEFAULT_SEPARATOR: Final = ","
LABEL: Final = "label"
"""Name of the label column if neither the task nor the device names one."""

MISSING: Final = frozenset({"", "na", "n/a", "nan", "null", "none", "?"})
"""Texts of a missing value, in lower case."""

_SEP_LINE: Final = re.compile(r'"?sep=(.)"?', re.IGNORECASE)
"""First line by which spreadsheets name the separator."""
_DECIMAL_COMMA: Final = re.compile(r"[+-]?\d*,\d+")
_UNIT: Final = re.compile(r"[+-]?\d[\d.,]*\s*([^\d\s.,]{1,8})|([^\d\s.,+-]{1,8})\s*[+-]?\d[\d.,]*")

_BATCH_ROWS: Final = 1 << 16
_SHOWN: Final = 40


@dataclass(frozen=True, slots=True)
class TableSpec:
    """The columns that a task takes of a table.

    Attributes:
        width: values of a sample.
        data: the task's declaration.
        label: name of the label column by the device's configuration; empty for the task's.
        separator, decimal: of CSV files; empty to find them.
        labelled: whether labels are needed.
        growing: whether a last line without its end is no sample yet.
    """

    width: int
    data: DataDeclaration = NO_DECLARATION
    label: str = ""
    separator: str = ""
    decimal: str = ""
    labelled: bool = True
    growing: bool = False

    @property
    def label_name(self) -> str:
        """Name of the label column; empty if none is given."""
        return self.label or self.data.label


@dataclass(frozen=True, slots=True)
class Columns:
    """Positions of a table's columns: of each feature, in the task's order, and of the label; None if it has none.

    Attributes:
        names: of the features, in the same order, for messages.
        unused: names of all other columns.
    """

    features: tuple[int, ...]
    label: int | None
    names: tuple[str, ...]
    unused: tuple[str, ...] = ()

    @property
    def all(self) -> tuple[int, ...]:
        """The features' positions, and the label's last."""
        return self.features if self.label is None else (*self.features, self.label)


def columns_of(header: Sequence[str] | None, count: int, spec: TableSpec, origin: Path) -> Columns:
    """Return the columns to read of a table.

    Args:
        header: the names of its columns; None if it has no header.
        count: number of its columns.
        spec: what the task takes.
        origin: the file, for messages.

    Raises:
        DataError: a column is missing, or named twice.
    """
    if header is None:
        return _by_position(count, spec, origin)
    names = [name.strip() for name in header]
    label = _label_column(names, spec, origin)
    if spec.data.features:
        features = tuple(_position(names, source[0], origin) for source in spec.data.columns)
    else:
        features = tuple(i for i in range(count) if i != label)
    unused = tuple(name for i, name in enumerate(names) if i != label and i not in features)
    return Columns(features, label, spec.data.features or tuple(names[i] for i in features), unused)


def _by_position(count: int, spec: TableSpec, origin: Path) -> Columns:
    if spec.label:
        raise DataError(
            f"{origin} has no header, so it has no column {spec.label!r}", hint="add a line with the columns' names"
        )
    label = count - 1 if spec.labelled or count == (len(spec.data.sources) or spec.width) + 1 else None
    places = tuple(range(count if label is None else count - 1))
    taken = len(spec.data.sources) or spec.width
    if spec.data.features and len(places) != taken:
        expected = f"{taken} features" + (" and a label" if spec.labelled else "")
        raise DataError(
            f"{origin} has {count} columns and no header with their names; the task takes {expected}",
            hint="add a line with the columns' names",
        )
    return Columns(places, label, spec.data.features or tuple(f"{i + 1}" for i in places))


def _label_column(names: list[str], spec: TableSpec, origin: Path) -> int | None:
    found = _find(names, spec.label_name or LABEL, origin)
    if found is not None:
        # Without names, a table of features alone may call one of them "label".
        mistaken = not (spec.labelled or spec.label_name or spec.data.features) and len(names) == spec.width
        return None if mistaken else found
    taken = {source[0] for source in spec.data.columns}
    rest = [i for i, name in enumerate(names) if name not in taken]
    if not spec.label_name and not spec.data.features:
        return len(names) - 1 if spec.labelled or len(names) == spec.width + 1 else None
    if not spec.label_name and len(rest) == 1:
        return rest[0]
    if spec.labelled:
        shown = ", ".join(names[i] for i in rest)[:200]
        raise DataError(
            f"{origin} has no column {spec.label_name or LABEL!r}",
            hint=f"name the label column with --label; columns that are no feature: {shown or 'none'}",
        )
    return None


def _position(names: list[str], name: str, origin: Path) -> int:
    found = _find(names, name, origin)
    if found is None:
        raise DataError(
            f"{origin} has no column {name!r}, which the task takes",
            hint=f"its columns are: {', '.join(names)[:200]}",
        )
    return found


def _find(names: list[str], name: str, origin: Path) -> int | None:
    """Return the position of a name; one that differs in case alone is found if no other does."""
    same = [i for i, other in enumerate(names) if other == name]
    same = same or [i for i, other in enumerate(names) if other.casefold() == name.casefold()]
    if len(same) > 1:
        raise DataError(f"{origin} has {len(same)} columns named {name!r}", hint="rename all but one of them")
    return same[0] if same else None


# -------------------------------------------------------------------------------------------------------------- CSV


def read_csv(path: Path, spec: TableSpec, damage: Damage = STRICT) -> Raw:
    """Read a text table, one sample a line; a header is optional if the task names no features.

    Args:
        path: the file, in UTF-8, or in UTF-16 with its mark.
        spec: what the task takes.
        damage: counts the lines that are no samples.

    Returns:
        x (n, features) and y (n,), float64, missing features as nan; y is empty without labels.

    Raises:
        DataError: with file, line and column.
    """
    import csv  # imported late: devices with other formats save its memory

    try:
        wide = _is_wide(path)
        # Bytes that are no UTF-8 become surrogates, so that they damage their own line alone.
        coding = ("utf-16", "strict") if wide else ("utf-8-sig", "surrogateescape")
        with path.open(newline="", encoding=coding[0], errors=coding[1]) as file:
            form = _form(file, spec)
            file.seek(0)
            reader = csv.reader(_lines(file, path, growing=spec.growing), delimiter=form.separator)
            return _table(_rows(reader, path, damage), form, spec, path, damage)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        hint = "save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise DataError(f"{path} can't be read as CSV: {error}", hint=hint) from None


def _is_wide(path: Path) -> bool:
    """Return whether a text file is UTF-16, by its mark.

    Raises:
        DataError: it is of another kind than UTF-8, by its first bytes.
    """
    with path.open("rb") as raw:
        head = raw.read(4)
    if head[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE) and head != codecs.BOM_UTF32_LE:
        return True
    if head[:2] == b"PK":
        raise DataError(f"{path} is no text but a zip file or a workbook", hint="save the table as CSV")
    if any(head) and 0 in head:
        raise DataError(f"{path} seems to be UTF-16 without its mark, or UTF-32", hint="save it as UTF-8")
    return False


def _lines(file: TextIO, path: Path, *, growing: bool) -> Iterator[str]:
    first = True
    while line := file.readline(MAX_LINE_CHARS):
        if len(line) == MAX_LINE_CHARS:
            raise DataError(f"{path} has a line of more than {MAX_LINE_CHARS} characters")
        if growing and not line.endswith(("\n", "\r")):
            return
        yield "\n" if first and _SEP_LINE.fullmatch(line.strip("\r\n")) else line
        first = False


def _rows(reader: Any, path: Path, damage: Damage) -> Iterator[tuple[int, int, list[str]]]:
    """Yield each row that is not blank: its last line, the number of its lines, and its cells.

    A row that is no text is damage, once a first row has shown that the file is text: a quote that is never closed makes many
    lines one row, and each of them counts.
    """
    import csv

    first = True
    while True:
        before = reader.line_num
        try:
            cells = next(reader)
            text = "".join(cells)
            if not text.isascii():
                text.encode("utf-8", "surrogateescape").decode()
        except StopIteration:
            return
        except (csv.Error, UnicodeDecodeError) as error:
            if first:
                raise
            hint = "save the file as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
            damage.add(DataError(f"{path}, line {reader.line_num}: {error}", hint=hint), reader.line_num - before)
            continue
        if text.strip() and not text.strip("\0 \r\n"):
            damage.add(DataError(f"{path}, line {reader.line_num}: only zero bytes, as a power loss leaves them"))
        elif text.strip():
            first = False
            yield reader.line_num, reader.line_num - before, cells


@dataclass(frozen=True, slots=True)
class _Form:
    """How a text table is written.

    Attributes:
        separator: of its columns.
        width: the number of columns that most of its first lines have. A line with another that begins with # is a comment.
        decimal: the decimal mark, a point or a comma.
    """

    separator: str
    width: int
    decimal: str


def _form(file: TextIO, spec: TableSpec) -> _Form:
    """Return the form of the table by its first lines.

    The separator is the first of those that cut the most of them into equally many columns, two at least. The decimal mark is a
    comma if some cells have one, no cell has a point, and a comma isn't the separator.
    """
    import csv

    head = islice(iter(lambda: file.readline(MAX_LINE_CHARS), ""), SNIFFED_LINES)
    text = [line for line in head if line.strip() and "\0" not in line]
    named = _SEP_LINE.fullmatch(text[0].strip("\r\n")) if text else None
    given = spec.separator or (named[1] if named else "")
    best, most = _Form(given or DEFAULT_SEPARATOR, 0, spec.decimal or "."), 0
    for separator in (given,) if given else SEPARATORS:
        try:
            rows = list(csv.reader(text[1:] if named else text, delimiter=separator))
        except csv.Error:
            continue
        widths = Counter(len(cells) for cells in rows if len(cells) > 1)
        width, lines = max(widths.items(), key=lambda item: item[1], default=(0, 0))
        if lines > most:
            best, most = _Form(separator, width, spec.decimal or _decimal(rows, separator)), lines
    return best


def _decimal(rows: Sequence[Sequence[str]], separator: str) -> str:
    cells = [cell.strip() for row in rows for cell in row]
    commas = separator != "," and any(_DECIMAL_COMMA.fullmatch(cell) for cell in cells)
    return "," if commas and not any("." in cell and _number(cell) is not None for cell in cells) else "."


def _table(rows: Iterable[tuple[int, int, list[str]]], form: _Form, spec: TableSpec, path: Path, damage: Damage) -> Raw:
    numbers = _Numbers(spec, path, form.decimal)
    columns: Columns | None = None
    count = 0
    for line, lines, cells in rows:
        comment, title = cells[0].startswith("#"), columns is None and len(cells) == 1 < form.width
        if title or (comment and len(cells) != form.width):
            continue
        if columns is None:
            cells[0] = cells[0].lstrip("# ")
            count, header = len(cells), _is_header(cells, form, spec)
            if count < 2 and spec.labelled:
                raise DataError(
                    f"{path} has one column; it needs features and a label",
                    hint="if its columns have an unusual separator, set `separator` in the configuration",
                )
            columns = columns_of(cells if header else None, count, spec, path)
            if header:
                continue
        numbers.check_room(columns, line)
        try:
            if len(cells) != count:
                raise DataError(f"{path}, line {line}: {len(cells)} columns instead of {count}")
            numbers.add(cells, columns, line)
        except DataError as error:
            damage.add(error, lines)
    if columns is None or not numbers.lines:
        raise NoSampleError(f"{path} holds no sample")
    return numbers.raw(columns)


def _is_header(cells: list[str], form: _Form, spec: TableSpec) -> bool:
    """Return whether a row has a name of the task, or, where each column is a number, a text that is no label."""
    names = {*(source[0] for source in spec.data.columns), spec.label_name} - {""}
    texts = [cell.strip() for cell in cells]
    if spec.data.sources or any(text in names for text in texts):
        return any(text in names for text in texts)
    known = (
        _number(t, form.decimal) is not None or t.lower() in MISSING or spec.data.class_of(t) is not None for t in texts
    )
    return not all(known)


def _number(cell: str, decimal: str = ".") -> float | None:
    if decimal == "," and cell.count(",") == 1 and "." not in cell:
        cell = cell.replace(",", ".")
    try:
        return float(cell)
    except ValueError:
        return None


class _Numbers:
    """The numbers of a text table as they are read."""

    def __init__(self, spec: TableSpec, path: Path, decimal: str) -> None:
        self._spec, self._path, self._decimal = spec, path, decimal
        self._values, self._labels = array("d"), array("d")
        self.lines = array("q")

    def add(self, cells: list[str], columns: Columns, line: int) -> None:
        """Add one row, or nothing if it is damaged.

        Raises:
            DataError: a cell is neither a number nor missing, or a label is of no class.
        """
        if self._spec.data.sources:
            pairs = zip(columns.features, self._spec.data.sources, strict=True)
            values = [value for at, source in pairs for value in self._values_of(source, cells[at], at, line)]
        else:
            values = [self._feature(cells[at], at, line) for at in columns.features]
        if columns.label is not None and self._spec.labelled:
            self._labels.append(self._label(cells[columns.label], columns.label, line))
        self._values.extend(values)
        self.lines.append(line)

    def check_room(self, columns: Columns, line: int) -> None:
        """Check that one more row may be added.

        Raises:
            DataError: the table is too large.
        """
        if len(self._values) + len(columns.names) > MAX_TABLE_VALUES:
            raise DataError(
                f"{self._path}, line {line}: the table has more than {MAX_TABLE_VALUES} numbers",
                hint="give the device a part of it",
            )

    def _values_of(self, source: Source, cell: str, at: int, line: int) -> Sequence[float]:
        if len(source) == 1:
            return (self._feature(cell, at, line),)
        if cell.strip().lower() in MISSING:
            return (math.nan,) * len(names_of(source))
        try:
            return values_of(source, cell)
        except DataError as error:
            raise self._refuse(cell, at, line, "is no time", error.hint) from None

    def _feature(self, cell: str, at: int, line: int) -> float:
        number = _number(cell, self._decimal)
        if number is None:
            if cell.strip().lower() not in MISSING:
                raise self._refuse(cell, at, line, "is not a number", _number_hint(cell))
            number = math.nan
        return number

    def _label(self, cell: str, at: int, line: int) -> float:
        text, data = cell.strip(), self._spec.data
        if data.labels:
            found = data.class_of(text)
            if found is None:
                raise self._refuse(cell, at, line, "is no label of the task", f"labels: {', '.join(data.labels)[:200]}")
            return found
        number = _number(text, self._decimal)
        if text.lower() in MISSING:
            raise self._refuse(cell, at, line, "is no label", "every sample needs its label: remove that row")
        if number is None:
            hint = "labels of text need their names in the task: shoal-fleet task compile --labels NAME,NAME,..."
            raise self._refuse(cell, at, line, "is not a number", hint)
        return number

    def _refuse(self, cell: str, at: int, line: int, complaint: str, hint: str) -> DataError:
        return DataError(f"{self._path}, line {line}, column {at + 1}: {cell[:_SHOWN]!r} {complaint}", hint=hint)

    def raw(self, columns: Columns) -> Raw:
        """Return the table."""
        x = np.frombuffer(self._values, np.float64).reshape(len(self.lines), -1)
        return Raw(
            x, np.array(self._labels), self._path, lines=self.lines, columns=columns.names, unused=columns.unused
        )


def _number_hint(cell: str) -> str:
    if _number(cell.replace(",", ".", 1)) is not None:
        return 'write numbers with a decimal point, or give the setting decimal = ","'
    if _number("".join(cell.replace(",", "").replace("'", "").split())) is not None:
        return "write numbers without a mark between thousands"
    if found := _UNIT.fullmatch(cell.strip()):
        return f"write the number alone, without {found[1] or found[2]!r}"
    return "leave the cell empty if its value is missing"


# ---------------------------------------------------------------------------------------------------------- Parquet


def read_parquet(path: Path, spec: TableSpec, damage: Damage = STRICT) -> Raw:
    """Read a Parquet file; its columns are found by name.

    Arguments and result are those of `read_csv`.

    Raises:
        DataError: pyarrow is not installed, or the file is damaged, too large, or lacks a column.
    """
    arrow, parquet = _pyarrow(path)
    try:
        with parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            columns = columns_of(names, len(names), spec, path)
            if file.metadata.num_rows * max(len(columns.names), 1) > MAX_TABLE_VALUES:
                raise DataError(f"{path} has more than {MAX_TABLE_VALUES} numbers", hint="give the device a part of it")
            wanted = columns.all if spec.labelled else columns.features
            parts = [
                _parquet_rows(batch, [names[i] for i in wanted], columns, spec, path, damage)
                for batch in file.iter_batches(_BATCH_ROWS, columns=[names[i] for i in wanted])
            ]
    except (OSError, arrow.ArrowException) as error:
        raise DataError(f"{path} can't be read as Parquet: {str(error)[:200]}") from None
    if not sum(len(x) for x, _ in parts):
        raise NoSampleError(f"{path} holds no sample")
    x, y = (np.concatenate(values) for values in zip(*parts, strict=True))
    bad = np.isnan(y) if spec.data.labels and spec.labelled else None
    return Raw(x, y, path, columns=columns.names, unused=columns.unused, bad=bad)


def _pyarrow(path: Path) -> tuple[Any, Any]:
    from importlib import import_module

    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(
            f"{path} is a Parquet file, and pyarrow is not installed",
            hint="pip install 'shoal[parquet]', or save the table as CSV",
        ) from None


def _parquet_rows(
    batch: Any, names: Sequence[str], columns: Columns, spec: TableSpec, path: Path, damage: Damage
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    found = [batch.column(batch.schema.get_field_index(name)).to_numpy(zero_copy_only=False) for name in names]
    x = np.empty((batch.num_rows, len(columns.names)), np.float64)
    sources = spec.data.sources or ((),) * len(columns.features)
    first = 0
    for name, values, source in zip(names, found, sources, strict=False):
        if len(source) > 1:
            parts = _parquet_values(source, values, f"{path}, column {name!r}")
        elif values.dtype.kind in "fiub":
            parts = values.astype(np.float64)[:, None]
        else:
            raise DataError(f"{path}, column {name!r}: {values.dtype} values are no numbers")
        x[:, first : first + parts.shape[1]] = parts
        first += parts.shape[1]
    if len(found) == len(columns.features):
        return x, np.empty(0)
    return x, _parquet_labels(found[-1], names[-1], spec, path, damage)


def _parquet_values(source: Source, values: NDArray[Any], where: str) -> NDArray[np.float64]:
    """Return the values of a column that is no plain number, shape (n, values of one cell)."""
    blank = (math.nan,) * len(names_of(source))
    try:
        rows = [blank if str(v).lower() in MISSING | {"nat"} else values_of(source, str(v)) for v in values]
    except DataError as error:
        raise DataError(f"{where}: {error}", hint=error.hint) from None
    return np.array(rows, np.float64).reshape(len(values), len(blank))


def _parquet_labels(
    values: NDArray[Any], name: str, spec: TableSpec, path: Path, damage: Damage
) -> NDArray[np.float64]:
    if values.dtype.kind in "iufb" and not spec.data.labels:
        return values.astype(np.float64)
    return class_numbers([str(value) for value in values], spec.data, f"{path}, column {name!r}", damage)


def class_numbers(names: Sequence[str], data: DataDeclaration, where: str, damage: Damage) -> NDArray[np.float64]:
    """Return the class of each label's text, shape (n,); nan for one of no class, which is damage."""
    classes = {name: float(at) for name in set(names) if (at := data.class_of(name)) is not None}
    for row, name in enumerate(names):
        if name not in classes:
            error = DataError(
                f"{where}, row {row}: {name[:_SHOWN]!r} is no label of the task",
                hint=f"labels: {', '.join(data.labels)[:200]}"
                if data.labels
                else "name the classes in the task: shoal-fleet task compile --labels NAME,NAME,...",
            )
            damage.add(error)
    return np.array([classes.get(name, math.nan) for name in names])
