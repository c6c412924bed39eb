"""The declaration of a task's data from the owner's command line: features from a file or a list, labels, preparation.

A file of features has a line for each, in the order of the model's inputs: ``NAME``, ``NAME,LOW,HIGH``, ``NAME,hour``,
``NAME,weekday`` or ``NAME,categories,VALUE,...``. Empty lines and lines that begin with ``#`` are skipped. Names with a comma are
quoted as in CSV.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final

from shoal import limits
from shoal.errors import TaskError
from shoal.task.data_declaration import (
    CATEGORIES,
    STANDARDISE_LOCALLY,
    DataDeclaration,
    bounds_of,
    features_of,
    names_of,
)
from shoal.task.manifest import statistics_length

MAX_FILE_BYTES: Final = 1 << 20
"""Largest file of features."""


def declare(
    *,
    features: str = "",
    label: str = "",
    labels: str = "",
    standardise: str = "",
    missing: str = "error",
    target: str = "",
) -> DataDeclaration:
    """Return the declaration that the options of ``task compile`` make.

    Args:
        features: a file of features, or their names with commas between.
        label: name of the label column.
        labels: names of the classes, with commas between.
        standardise: ``off``, ``local`` or ``federated``; empty for ``federated`` if every feature has bounds and devices can
            hide the statistics of so many (`limits.MAX_STATISTICS`), else ``local`` if features are named, else ``off``.
        missing: ``error`` or ``mean``.
        target: LOW,HIGH, the range of the numbers to predict; empty if it is not declared.

    Raises:
        TaskError: a file can't be read, a line is malformed, or the declaration contradicts itself.
    """
    rows = _features(features)
    numbers = [row for row in rows if _is_number(row)]
    bounded = bool(rows) and all(len(row) == 3 for row in numbers)
    if not bounded and any(len(row) == 3 for row in numbers):
        first = next(row[0] for row in numbers if len(row) != 3)
        raise TaskError(
            f"feature {first!r} has no bounds, and others have", hint="write NAME,LOW,HIGH for all, or for none"
        )
    sources = tuple((row[0],) if _is_number(row) else tuple(row) for row in rows)
    names = features_of(sources)
    low, high = _bounds(rows) if bounded else ((), ())
    hidden = statistics_length(len(names)) <= limits.MAX_STATISTICS
    if standardise == "federated" and not hidden:
        raise TaskError(
            f"the fleet's figures of {len(names)} features are more than a device can hide", hint=STANDARDISE_LOCALLY
        )
    default = "federated" if bounded and hidden else "local" if rows else "off"
    return DataDeclaration(
        features=names,
        sources=sources if len(numbers) < len(rows) else (),
        low=low,
        high=high,
        label=label,
        labels=tuple(name.strip() for name in _cells(labels)),
        standardise=standardise or default,
        missing=missing,
        target=_target(target),
    )


def _target(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(part) for part in text.split(",")) if text else ()
    except ValueError:
        raise TaskError(f"the range of targets {text[:80]!r} is no two numbers", hint="write LOW,HIGH") from None


def _features(text: str) -> list[list[str]]:
    path = Path(text)
    if not text or not (_is_file(path) or path.suffix in (".txt", ".csv")):
        return [[name.strip()] for name in _cells(text)]
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except (OSError, UnicodeDecodeError) as error:
        raise TaskError(
            f"the features in {path} can't be read: {error}", hint="give the path of a file, or names with commas"
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise TaskError(f"{path} has more than {MAX_FILE_BYTES} characters")
    found = []
    for number, line in enumerate(data.splitlines(), 1):
        if line.strip() and not line.startswith("#"):
            row = [cell.strip() for cell in _cells(line)]
            if not _is_number(row):
                try:
                    names_of(tuple(row))
                except TaskError as error:
                    raise TaskError(f"{path}, line {number}: {error}", hint=error.hint) from None
            found.append(row)
    if not found:
        raise TaskError(f"{path} names no feature", hint="write a line for each: NAME, or NAME,LOW,HIGH")
    return found


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except (OSError, ValueError):  # a list of names is longer than a file's name can be
        return False


def _cells(line: str) -> list[str]:
    try:
        return next(csv.reader([line], skipinitialspace=True), [])
    except csv.Error as error:
        raise TaskError(f"{line[:80]!r} is no list of names: {error}") from None


def _is_number(row: list[str]) -> bool:
    return len(row) == 1 or (len(row) == 3 and row[1] != CATEGORIES)


def _bounds(rows: list[list[str]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    found: list[tuple[float, float]] = []
    try:
        for row in rows:
            if _is_number(row):
                found.append((float(row[1]), float(row[2])))
            else:
                found += [bounds_of(tuple(row))] * len(names_of(tuple(row)))
        return tuple(low for low, _ in found), tuple(high for _, high in found)
    except ValueError as error:
        raise TaskError(f"a bound of a feature is no number: {error}", hint="write NAME,LOW,HIGH") from None
