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

import math
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
from shoal.task.data_declaration import NO_DECLARATION, DataDeclaration

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

_BATCH_ROWS: Final = 1 << 16
_SHOWN: Final = 40


@dataclass(frozen=True, slots=True)
class TableSpec:
    """The columns that a task takes of a table.

    Attributes:
        width: values of a sample.
        data: the task's declaration.
        label: name of the label column by the device's configuration; empty for the task's.
        separator: of CSV files; empty to find it.
        labelled: whether labels are needed.
        growing: whether a last line without its end is no sample yet.
    """

    width: int
    data: DataDeclaration = NO_DECLARATION
    label: str = ""
    separator: str = ""
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
    """

    features: tuple[int, ...]
    label: int | None
    names: tuple[str, ...]

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
        features = tuple(_position(names, name, origin) for name in spec.data.features)
    else:
        features = tuple(i for i in range(count) if i != label)
    return Columns(features, label, tuple(names[i] for i in features))


def _by_position(count: int, spec: TableSpec, origin: Path) -> Columns:
    if spec.label:
        raise DataError(
            f"{origin} has no header, so it has no column {spec.label!r}", hint="add a line with the columns' names"
        )
    label = count - 1 if spec.labelled or count == spec.width + 1 else None
    places = tuple(range(count if label is None else count - 1))
    if spec.data.features and len(places) != spec.width:
        expected = f"{spec.width} features" + (" and a label" if spec.labelled else "")
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
    rest = [i for i, name in enumerate(names) if name not in spec.data.features]
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
        path: the file, in UTF-8.
        spec: what the task takes.
        damage: counts the lines that are no samples.

    Returns:
        x (n, features) and y (n,), float64, missing features as nan; y is empty without labels.

    Raises:
        DataError: with file, line and column.
    """
    import csv  # imported late: devices with other formats save its memory

    try:
        # Bytes that are no UTF-8 become surrogates, so that they damage their own line alone.
        with path.open(newline="", encoding="utf-8-sig", errors="surrogateescape") as file:
            separator = spec.separator or _separator(file)
            file.seek(0)
            reader = csv.reader(_lines(file, path, growing=spec.growing), delimiter=separator)
            return _table(_rows(reader, path, damage), spec, path, damage)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DataError(f"{path} can't be read as CSV: {error}") from None


def _lines(file: TextIO, path: Path, *, growing: bool) -> Iterator[str]:
    while line := file.readline(MAX_LINE_CHARS):
        if len(line) == MAX_LINE_CHARS:
            raise DataError(f"{path} has a line of more than {MAX_LINE_CHARS} characters")
        if growing and not line.endswith(("\n", "\r")):
            return
        yield line


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
            damage.add(DataError(f"{path}, line {reader.line_num}: {error}"), reader.line_num - before)
            continue
        if text.strip() and not text.strip("\0 \r\n"):
            damage.add(DataError(f"{path}, line {reader.line_num}: only zero bytes, as a power loss leaves them"))
        elif text.strip():
            first = False
            yield reader.line_num, reader.line_num - before, cells


def _separator(file: TextIO) -> str:
    """Return the first separator of those that cut the most of the first lines into equally many columns, two at least."""
    import csv

    head = islice(iter(lambda: file.readline(MAX_LINE_CHARS), ""), SNIFFED_LINES)
    text = [line for line in head if line.strip() and "\0" not in line]
    best, most = DEFAULT_SEPARATOR, 0
    for separator in SEPARATORS:
        try:
            widths = Counter(len(cells) for cells in csv.reader(text, delimiter=separator))
        except csv.Error:
            continue
        lines = max((lines for width, lines in widths.items() if width > 1), default=0)
        if lines > most:
            best, most = separator, lines
    return best


def _table(rows: Iterable[tuple[int, int, list[str]]], spec: TableSpec, path: Path, damage: Damage) -> Raw:
    numbers = _Numbers(spec, path)
    columns: Columns | None = None
    count = 0
    for line, lines, cells in rows:
        if columns is None:
            count, header = len(cells), _is_header(cells, spec)
            if count < 2 and spec.labelled:
                raise DataError(
                    f"{path} has one column; it needs features and a label",
                    hint="if its columns have an unusual separator, give it with --separator",
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


def _is_header(cells: list[str], spec: TableSpec) -> bool:
    names = {*spec.data.features, spec.label_name} - {""}
    texts = [cell.strip() for cell in cells]
    if any(text in names for text in texts):
        return True
    return any(_number(t) is None and t.lower() not in MISSING and spec.data.class_of(t) is None for t in texts)


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    except ValueError:
        return None


class _Numbers:
    """The numbers of a text table as they are read."""

    def __init__(self, spec: TableSpec, path: Path) -> None:
        self._spec, self._path = spec, path
        self._values, self._labels = array("d"), array("d")
        self.lines = array("q")

    def add(self, cells: list[str], columns: Columns, line: int) -> None:
        """Add one row, or nothing if it is damaged.

        Raises:
            DataError: a cell is neither a number nor missing, or a label is of no class.
        """
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
        if len(self._values) + len(columns.features) > MAX_TABLE_VALUES:
            raise DataError(
                f"{self._path}, line {line}: the table has more than {MAX_TABLE_VALUES} numbers",
                hint="give the device a part of it",
            )

    def _feature(self, cell: str, at: int, line: int) -> float:
        number = _number(cell)
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
        number = _number(text)
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
        return Raw(x, np.array(self._labels), self._path, self.lines, columns.names)


def _number_hint(cell: str) -> str:
    if _number(cell.replace(",", ".", 1)) is not None:
        return "write numbers with a decimal point"
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
            _check_rows(file.metadata.num_rows, len(columns.features), path)
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
    return Raw(x, y, path, columns=columns.names, bad=np.isnan(y) if spec.data.labels and spec.labelled else None)


def _pyarrow(path: Path) -> tuple[Any, Any]:
    from importlib import import_module

    try:
        return import_module("pyarrow"), import_module("pyarrow.parquet")
    except ImportError:
        raise DataError(
            f"{path} is a Parquet file, and pyarrow is not installed",
            hint="pip install 'shoal[parquet]', or save the table as CSV",
        ) from None


def _check_rows(rows: int, width: int, path: Path) -> None:
    if rows * max(width, 1) > MAX_TABLE_VALUES:
        raise DataError(f"{path} has more than {MAX_TABLE_VALUES} numbers", hint="give the device a part of it")


def _parquet_rows(
    batch: Any, names: Sequence[str], columns: Columns, spec: TableSpec, path: Path, damage: Damage
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    width = len(columns.features)
    found = [batch.column(batch.schema.get_field_index(name)).to_numpy(zero_copy_only=False) for name in names]
    x = np.empty((batch.num_rows, width), np.float64)
    for at in range(width):
        if found[at].dtype.kind not in "fiub":
            raise DataError(f"{path}, column {names[at]!r}: {found[at].dtype} values are no numbers")
        x[:, at] = found[at]
    if len(found) == width:
        return x, np.empty(0)
    return x, _parquet_labels(found[-1], names[-1], spec, path, damage)


def _parquet_labels(
    values: NDArray[Any], name: str, spec: TableSpec, path: Path, damage: Damage
) -> NDArray[np.float64]:
    if values.dtype.kind in "iufb" and not spec.data.labels:
        return values.astype(np.float64)
    return class_numbers([str(value) for value in values], spec.data, f"{path}, column {name!r}", damage)


def class_numbers(names: Sequence[str], data: DataDeclaration, where: str, damage: Damage) -> NDArray[np.float64]:
    """Return the class of each label's text, shape (n,); nan for one of no class, which is damage."""
    classes = {name: float(i) for i, name in enumerate(data.labels)}
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
