"""A task's declaration of its data: names of the columns and labels, and the preparation that every device does.

The owner signs it with the task. A device reads a table's columns by their names, turns a label's text into its class,
replaces missing values, and standardises the features, as the declaration says. A task without a declaration takes numbers
by position, as they are.

Example: two features with bounds, so that devices can standardise them with figures of the whole fleet.

    >>> from shoal.task.data_declaration import DataDeclaration
    >>> data = DataDeclaration(
    ...     features=("radius", "area"), low=(0, 0), high=(50, 5000), labels=("benign", "malignant"), standardise="federated"
    ... )
    >>> data.class_of("malignant")
    1

Columns of a table may become several values of a sample: categories, and times of day or week. A source is a tuple of texts, as
it stands in a task's declaration:

- ``("temperature",)``: the column's number, one value;
- ``("state", "categories", "on", "off")``: a value of 0 or 1 for each category, and one for any text that is none of them;
- ``("time", "hour")``: sine and cosine of the time of day, so that midnight is near 23:59;
- ``("time", "weekday")``: a value of 0 or 1 for each day, Monday first.

Times are ISO 8601 as they stand in the table (an offset is not applied), or seconds since 1970 in UTC.

Example: a column of categories.

    >>> from shoal.task.data_declaration import names_of, values_of
    >>> names_of(("state", "categories", "on", "off"))
    ('state=on', 'state=off', 'state: other')
    >>> values_of(("state", "categories", "on", "off"), "broken")
    (0.0, 0.0, 1.0)
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final, Literal

from shoal.errors import DataError, TaskError

Source = tuple[str, ...]
CATEGORIES: Final = "categories"
HOUR: Final = "hour"
WEEKDAY: Final = "weekday"
MAX_CATEGORIES: Final = 1000
"""Most categories of one column."""

_DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
_SECONDS_A_DAY: Final = 86400
TIME_HINT: Final = "write times as 2026-11-28 14:30 or as seconds since 1970"


def names_of(source: Source) -> tuple[str, ...]:
    """Return the names of a source's values.

    Raises:
        TaskError: the source is none of the kinds, or names a category twice or none.
    """
    column, *rest = source
    if not rest:
        return (column,)
    kind, *values = rest
    if kind == HOUR and not values:
        return f"{column}: hour, sine", f"{column}: hour, cosine"
    if kind == WEEKDAY and not values:
        return tuple(f"{column}: {day}" for day in _DAYS)
    if kind == CATEGORIES and 1 <= len(values) <= MAX_CATEGORIES and len({*values}) == len(values) and all(values):
        return (*(f"{column}={value}" for value in values), f"{column}: other")
    raise TaskError(
        f"column {column!r} is declared as {', '.join(rest)[:80]!r}",
        hint=f"write NAME, NAME,LOW,HIGH, NAME,{HOUR}, NAME,{WEEKDAY} or NAME,{CATEGORIES},VALUE,VALUE,...",
    )


def bounds_of(source: Source) -> tuple[float, float]:
    """Return the bounds of each value of a source that is no plain number."""
    return (-1.0, 1.0) if source[1] == HOUR else (0.0, 1.0)


def values_of(source: Source, cell: str) -> tuple[float, ...]:
    """Return the values of a cell of a source that is no plain number.

    Raises:
        DataError: the cell is no time.
    """
    kind, text = source[1], cell.strip()
    if kind == CATEGORIES:
        known = source[2:]
        at = known.index(text) if text in known else len(known)
        return tuple(float(i == at) for i in range(len(known) + 1))
    time = _time(text)
    if kind == WEEKDAY:
        return tuple(float(i == time.weekday()) for i in range(len(_DAYS)))
    angle = 2 * math.pi * (time.hour * 3600 + time.minute * 60 + time.second) / _SECONDS_A_DAY
    return math.sin(angle), math.cos(angle)


def _time(text: str) -> datetime:
    try:
        return datetime.fromtimestamp(float(text), UTC)
    except (OverflowError, OSError):
        raise DataError(f"{text[:40]!r} is no time", hint=TIME_HINT) from None
    except ValueError:
        pass
    try:
        return datetime.fromisoformat(text)
    except ValueError:
        raise DataError(f"{text[:40]!r} is no time", hint=TIME_HINT) from None


MAX_NAMES: Final = 16384
"""Most features, and most labels, that a task can name."""

MAX_NAME_CHARS: Final = 100
MAX_NAMES_BYTES: Final = 128 * 1024
"""Bytes of all names together in UTF-8: a manifest has 256 KiB."""

MAX_BOUND: Final = 1e30
"""Largest bound of a feature: its square is still a float64, and the range is one after rounding to float32."""

Standardise = Literal["off", "local", "federated"]
STANDARDISE_LOCALLY: Final = "compile the task with --standardise local"
"""The hint where the fleet's figures can't be had."""
STANDARDISE: Final[tuple[Standardise, ...]] = ("off", "local", "federated")
Missing = Literal["error", "mean"]
MISSING: Final[tuple[Missing, ...]] = ("error", "mean")


@dataclass(frozen=True, slots=True)
class DataDeclaration:
    """Names of a task's columns and classes, and the preparation of its samples.

    Attributes:
        features: name of each value of a sample, in order; empty if values are taken by position.
        sources: the columns of a table that the features come from, if some of them are no plain numbers
            (`shoal.task.data_declaration`); empty if each feature is a column.
        low, high: bounds of each feature, for federated standardisation; empty if they are not declared.
        label: name of the label column; empty if the device's configuration or the file says which it is.
        labels: name of each class, in order; empty if labels are numbers.
        standardise: ``off``, ``local`` with each device's own means and deviations, or ``federated`` with the fleet's.
        missing: ``error``, or ``mean``: a missing value is the feature's mean, 0 after standardisation.
        target: the range in which most numbers lie that a regression task predicts: its lower and upper end; empty if it is
            not declared. The graphs train on numbers less the range's centre, divided by a quarter of its width, and answer in
            the units of the data; losses are squares of these quarters.
    """

    features: tuple[str, ...] = ()
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    label: str = ""
    labels: tuple[str, ...] = ()
    standardise: str = "off"
    missing: str = "error"
    target: tuple[float, ...] = ()
    sources: tuple[Source, ...] = ()

    def __post_init__(self) -> None:
        if any(not source for source in self.sources) or (self.sources and self.features != features_of(self.sources)):
            raise TaskError("the features are not those of the declared columns")
        _check_names(self.features, "feature")
        _check_names(self.labels, "label")
        if self.label:
            _check_names((self.label,), "label column")
        if self.label in {source[0] for source in self.columns}:
            raise TaskError(f"column {self.label!r} is a feature and the label", hint="name it in one of the two")
        if sum(len(name.encode()) for name in (*self.features, *self.labels)) > MAX_NAMES_BYTES:
            raise TaskError(f"the names of features and labels have more than {MAX_NAMES_BYTES} bytes")
        if self.standardise not in STANDARDISE:
            raise TaskError(f"standardise is one of {', '.join(STANDARDISE)}, not {self.standardise!r}")
        if self.missing not in MISSING:
            raise TaskError(f"missing is one of {', '.join(MISSING)}, not {self.missing!r}")
        if self.missing == "mean" and self.standardise == "off":
            raise TaskError(
                "missing values can be replaced by the mean only if the task standardises",
                hint="declare --standardise local or federated, or --missing error",
            )
        self._check_bounds()
        self._check_target()

    def _check_target(self) -> None:
        object.__setattr__(self, "target", tuple(float(value) for value in self.target))
        if self.target and not (len(self.target) == 2 and -MAX_BOUND <= self.target[0] < self.target[1] <= MAX_BOUND):
            raise TaskError(
                f"the range of targets is {self.target}",
                hint=f"give two numbers, the first below the second, both between -{MAX_BOUND:g} and {MAX_BOUND:g}",
            )

    @property
    def target_scale(self) -> tuple[float, float]:
        """Centre and unit of the targets: the middle of their range and a quarter of its width; 0 and 1 without one."""
        if not self.target:
            return 0.0, 1.0
        low, high = self.target
        return (low + high) / 2, (high - low) / 4

    def _check_bounds(self) -> None:
        for name in ("low", "high"):
            object.__setattr__(self, name, tuple(float(value) for value in getattr(self, name)))
        if not len(self.low) == len(self.high) or (self.low and len(self.low) != len(self.features)):
            raise TaskError("either every feature has a lower and an upper bound, or none has")
        for feature, low, high in zip(self.features, self.low, self.high, strict=bool(self.low)):
            if not (math.isfinite(low) and math.isfinite(high) and -MAX_BOUND <= low < high <= MAX_BOUND):
                raise TaskError(
                    f"feature {feature!r} has the bounds {low:g} and {high:g}",
                    hint=f"the first must be below the second, both between -{MAX_BOUND:g} and {MAX_BOUND:g}",
                )
        if self.standardise == "federated" and not self.low:
            raise TaskError(
                "federated standardisation needs the bounds of every feature",
                hint="write NAME,LOW,HIGH for each feature into the --features file, or declare --standardise local",
            )

    @property
    def columns(self) -> tuple[Source, ...]:
        """The columns of a table that the task takes, in order; each is a plain number if none is declared otherwise."""
        return self.sources or tuple((name,) for name in self.features)

    def class_of(self, name: str) -> int | None:
        """Return the number of the class of that name, in any case if no two labels differ in case alone; None if absent."""
        if name in self.labels:
            return self.labels.index(name)
        same = [at for at, label in enumerate(self.labels) if label.casefold() == name.casefold()]
        return same[0] if len(same) == 1 else None


def features_of(sources: Sequence[Source]) -> tuple[str, ...]:
    """Return the names of the values that columns become, in order."""
    return tuple(name for source in sources for name in names_of(source))


def _check_names(names: tuple[str, ...], what: str) -> None:
    if len(names) > MAX_NAMES:
        raise TaskError(f"{len(names)} names of a {what}, more than {MAX_NAMES}")
    for name in names:
        if not name or len(name) > MAX_NAME_CHARS or not name.isprintable() or name != name.strip():
            raise TaskError(
                f"{what} name {name[:MAX_NAME_CHARS]!r} is not valid",
                hint=f"1 to {MAX_NAME_CHARS} printable characters, without spaces around them",
            )
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise TaskError(
            f"two {what} columns are named {twice!r}" if what == "feature" else f"{what} {twice!r} occurs twice"
        )


NO_DECLARATION: Final = DataDeclaration()
"""Numbers by position, taken as they are."""
