"""Columns of a table that become several values of a sample: categories, and times of day or week.

A source is a tuple of texts, as it stands in a task's declaration:

- ``("temperature",)``: the column's number, one value;
- ``("state", "categories", "on", "off")``: a value of 0 or 1 for each category, and one for any text that is none of them;
- ``("time", "hour")``: sine and cosine of the time of day, so that midnight is near 23:59;
- ``("time", "weekday")``: a value of 0 or 1 for each day, Monday first.

Times are ISO 8601 as they stand in the table (an offset is not applied), or seconds since 1970 in UTC.

Example:
    >>> from shoal.task.feature_columns import names_of, values_of
    >>> names_of(("state", "categories", "on", "off"))
    ('state=on', 'state=off', 'state: other')
    >>> values_of(("state", "categories", "on", "off"), "broken")
    (0.0, 0.0, 1.0)
"""

from __future__ import annotations

import math
from datetime import UTC, datetime
from typing import Final

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
