"""The tables of docs/poison.md: attacks down, rules across, a table for each data set and algorithm; backdoors have their own."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shoal import limits
from shoal.report import record
from shoal_lab.bench.poison.attacks import ABSENT, ATTACKS

RESULTS: Final = Path(__file__).parents[4] / "results"

Rows = Sequence[Mapping[str, Any]]


def load(folder: Path = RESULTS) -> list[Mapping[str, Any]]:
    """Return the rows of the kept runs of ``shoal bench poison`` in ``folder``."""
    return [
        row
        for _, run in record.load(folder)
        if run["command"][1:3] == ["bench", "poison"]
        for row in run["data"]["rows"]
    ]


def tables(rows: Rows) -> dict[str, list[str]]:
    """Return the lines of a Markdown table for each data set and algorithm, by title.

    A cell is the honest devices' accuracy as the mean over the seeds, and the lowest of the seeds in parentheses if there are
    several. Before it there is the success of a backdoor, with the highest of the seeds.
    """
    by_data: dict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    strategies = {row["strategy"] for row in rows if row["attack"] == ABSENT}
    for row in rows:
        # An attack on one algorithm alone belongs to the table of those of the same data.
        own = row["strategy"] in strategies
        by_data[row["data"], row["strategy"] if own else min(strategies, default=row["strategy"])].append(row)
    return {f"{data}, {strategy}": _table(found) for (data, strategy), found in by_data.items()}


def _table(rows: Rows) -> list[str]:
    rules = [rule for rule in limits.ROBUST_RULES if any(r["rule"] == rule and r["attack"] != ABSENT for r in rows)]
    lines = [f"| attack | {' | '.join(rules)} |", "|---" * (len(rules) + 1) + "|"]
    for attack in ATTACKS:
        if attack == ABSENT:
            continue
        cells = [_cell([r for r in rows if (r["attack"], r["rule"]) == (attack, rule)]) for rule in rules]
        if any(cells):
            lines.append(f"| {attack} | {' | '.join(cell or '-' for cell in cells)} |")
    return lines


def _cell(rows: Rows) -> str:
    if not rows:
        return ""
    accuracy = _mean([float(row["accuracy"]) for row in rows], min)
    successes = [float(row["success"]) for row in rows if row.get("success") is not None]
    return f"{_mean(successes, max)} / {accuracy}" if successes else accuracy


def _mean(values: Sequence[float], worst: Callable[[Sequence[float]], float]) -> str:
    mean = sum(values) / len(values)
    return f"{mean:.1f} ({worst(values):.1f})" if len(values) > 1 else f"{mean:.1f}"


def _reference(rows: Rows, title: str) -> str:
    data, strategy = title.split(", ")
    absent = [r for r in rows if (r["attack"], r["data"], r["strategy"]) == (ABSENT, data, strategy)]
    return f"{_cell(absent)} without the three" if absent else "no run without the three"


def lines(rows: Rows) -> list[str]:
    """Return all tables as lines of Markdown, each below its title, with the largest error that a mask made."""
    out: list[str] = []
    opened = [row for row in rows if row.get("success") is not None]
    for title, table in tables([row for row in rows if row not in opened]).items():
        out += [f"**{title}**: {_reference(rows, title)}", "", *table, ""]
    for title, table in tables(opened).items():
        out += [f"**{title}**: success of a backdoor / accuracy", "", *table, ""]
    errors = [float(row["error"]) for row in rows]
    modes = sorted({row["mode"] for row in rows})
    out.append(f"Largest error of a mean under the mask ({', '.join(modes)}): {max(errors, default=0.0):.0e}.")
    return out


def block() -> str:
    """Return the text between the page's marks, from the kept results."""
    return "\n".join(["", *lines(load()), ""])
