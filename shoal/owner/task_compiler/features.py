"""The declaration of a task's data from the owner's command line: features from a file or a list, labels, preparation.

A file of features has a line for each, ``NAME`` or ``NAME,LOW,HIGH``, in the order of the model's inputs; empty lines and lines
that begin with ``#`` are skipped. Names with a comma are quoted as in CSV.
"""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Final

from shoal import limits
from shoal.errors import TaskError
from shoal.task.data_declaration import STANDARDISE_LOCALLY, DataDeclaration
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
    bounded = bool(rows) and all(len(row) == 3 for row in rows)
    low, high = _bounds(rows) if bounded else ((), ())
    if rows and not bounded and any(len(row) == 3 for row in rows):
        first = next(row[0] for row in rows if len(row) != 3)
        raise TaskError(
            f"feature {first!r} has no bounds, and others have", hint="write NAME,LOW,HIGH for all, or for none"
        )
    hidden = statistics_length(len(rows)) <= limits.MAX_STATISTICS
    if standardise == "federated" and not hidden:
        raise TaskError(
            f"the fleet's figures of {len(rows)} features are more than a device can hide", hint=STANDARDISE_LOCALLY
        )
    default = "federated" if bounded and hidden else "local" if rows else "off"
    return DataDeclaration(
        features=tuple(row[0] for row in rows),
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
            if len(row) not in (1, 3):
                raise TaskError(f"{path}, line {number}: {line[:80]!r} is neither NAME nor NAME,LOW,HIGH")
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


def _bounds(rows: list[list[str]]) -> tuple[tuple[float, ...], tuple[float, ...]]:
    try:
        return tuple(float(row[1]) for row in rows), tuple(float(row[2]) for row in rows)
    except ValueError as error:
        raise TaskError(f"a bound of a feature is no number: {error}", hint="write NAME,LOW,HIGH") from None
