"""Terminal output of `shoal simulate`: progress, and a table of results beside the published figures."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

from shoal.demo.report import ConsoleProgress
from shoal.util.console import say
from shoal_lab.experiments.common.experiment import Progress, Quiet

FIXED: Final = (
    *("experiment", "algorithm", "accuracy", "accuracy_last", "purity", "ari", "clusters", "rounds"),
    *("cpu_seconds_per_round", "published", "parameters", "history"),
    *("scenario", "strategy", "seed", "measure", "mean", "worst", "personal_mean", "personal_worst"),
)
"""Keys of a result that the details below the table leave out: the table shows them, or they are too long."""
COLUMNS: Final = (
    ("accuracy", "accuracy", 8, 2),
    ("last", "accuracy_last", 8, 2),
    ("published", "published", 9, 2),
    ("purity", "purity", 7, 3),
    ("ARI", "ari", 7, 3),
    ("clusters", "clusters", 9, 0),
    ("rounds", "rounds", 7, 0),
    ("cpu s/round", "cpu_seconds_per_round", 12, 3),
)
"""Head, key, width and digits of the table's columns."""
MOST_POINTS: Final = 60


def progress_of(rank: int) -> AbstractContextManager[Progress]:
    """Return what shows the progress of rank 0 on a terminal; it prints nothing elsewhere."""
    return ConsoleProgress(_figures) if rank == 0 and sys.stderr.isatty() else nullcontext(Quiet())


def _figures(record: Mapping[str, Any] | None) -> str:
    return ", ".join(f"{k} {_short(v)}" for k, v in (record or {}).items() if _is_scalar(v) and k != "round")


def report(title: str, results: Sequence[Mapping[str, Any]]) -> None:
    """Print a table of results (in the form of `Study.result`), and below it each result's other figures."""
    say(title)
    say()
    if all("personal_mean" in r for r in results):
        _fleet_table(results)
    else:
        _rows("algorithm", COLUMNS, [r if _is_number(r["published"]) else {**r, "published": None} for r in results])
    for r in results:
        _details(r)


def _fleet_table(results: Sequence[Mapping[str, Any]]) -> None:
    """Print mean and worst device of each strategy, by the cluster's model and after the personal finish."""
    digits = 2 if results[0]["measure"] == "accuracy" else 3
    figures = [(name, name, width, digits) for name, width in (("mean", 12), ("worst", 10))]
    figures += [(name, f"personal_{name}", width, digits) for name, width in (("mean", 8), ("worst", 7))]
    width = max(9, *(len(str(r["strategy"])) for r in results))
    say(f"{'':{width}}  {results[0]['measure'] + ' of the model':>22}  {'personal finish':>15}")
    _rows(
        "strategy",
        [*figures, ("ARI", "ari", 7, 3), ("clusters", "clusters", 9, 0), ("rounds", "rounds", 7, 0)],
        results,
    )


def _rows(name: str, columns: Sequence[tuple[str, str, int, int]], results: Sequence[Mapping[str, Any]]) -> None:
    """Print a table with a row for each result: the head, key, width and digits of each column."""
    width = max(9, *(len(str(r[name])) for r in results))
    say(f"{name:{width}} " + "".join(f" {head:>{wide}}" for head, _, wide, _ in columns))
    for r in results:
        cells = "".join(f" {_cell(r.get(key), wide, digits)}" for _, key, wide, digits in columns)
        say(f"{r[name]:{width}} {cells}")


def _details(result: Mapping[str, Any]) -> None:
    lines = []
    published = result["published"]
    if published is not None and not _is_number(published):
        lines.append(f"published: {_flat(published)}")
    for name, value in result.items():
        if name == "success":
            lines += _success_lines(value)
        elif name not in FIXED and (text := _flat(value)):
            lines.append(f"{name}: {text}")
    if lines:
        say()
        say(f"{result['algorithm']}:")
        for line in lines:
            say(f"  {line}")


def _success_lines(curves: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, curve in curves.items():
        for point in curve["points"][:MOST_POINTS]:
            at = f"{curve['line']} {point[curve['line']]:g}, {curve['axis']} {point[curve['axis']]:g}"
            lines.append(
                f"curve ({name}), k {curve['k']}, {at}: {100 * point['probability']:.0f} % of {point['trials']}"
            )
    return lines


def _flat(value: Any) -> str:
    """Return a scalar, or a mapping or short list of scalars, as text; "" for anything longer."""
    if _is_scalar(value):
        return _short(value)
    if isinstance(value, Mapping) and all(_is_scalar(v) for v in value.values()):
        return ", ".join(f"{k} {_short(v)}" for k, v in value.items())
    if isinstance(value, list) and len(value) <= MOST_POINTS and all(_is_scalar(v) for v in value):
        return ", ".join(_short(v) for v in value)
    return ""


def _is_scalar(value: Any) -> bool:
    return isinstance(value, bool | int | float | str)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _short(value: bool | int | float | str) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _cell(value: float | None, width: int, digits: int) -> str:
    return f"{'-':>{width}}" if value is None else f"{value:{width}.{digits}f}"
