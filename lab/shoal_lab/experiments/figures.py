"""The papers' figures from results: lines over rounds, curves of success, gaps, norms. Needs the extra ``plot``."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from shoal.errors import UsageError
from shoal.report.plot import Line, Panel, check, draw

Data = Mapping[str, Any]


def plot(results: Sequence[Data], path: Path, figure: str) -> None:
    """Draw results of one experiment (in the form of `Study.result`) as a figure of kind ``figure``.

    Raises:
        UsageError: there is no such kind, no such format, or nothing to draw.
        ConfigError: matplotlib is not installed, or the file can't be written.
    """
    check(path)
    draw(panels_of(results, figure), path)


def panels_of(results: Sequence[Data], figure: str) -> list[Panel]:
    """Return the panels that `plot` draws.

    Raises:
        UsageError: there is no such kind, or nothing to draw.
    """
    if figure not in _KINDS:
        raise UsageError(f"no kind of figure {figure!r}", hint=f"there are {', '.join(_KINDS)}")
    panels = [panel for panel in _KINDS[figure](results) if panel.lines]
    if not panels:
        raise UsageError(f"these results hold nothing for a figure of {figure}")
    return panels


def _over_rounds(
    results: Sequence[Data], key: str, label: str, *, scale: float = 1.0, published: bool = False
) -> Panel:
    """Return a panel with a line of ``history[...][key]`` for each algorithm, and published figures as levels."""
    lines, levels = [], {}
    marks: set[float] = set()
    for data in results:
        pairs = [(row["round"], row[key] * scale) for row in data["history"] if _number(row.get(key))]
        if pairs:
            lines.append(_line(str(data["algorithm"]), pairs))
        if published and _number(data.get("published")):
            levels[f"{data['algorithm']}, published"] = float(data["published"])
        marks |= set(_splits(data))
    return Panel(
        title=str(results[0]["experiment"]) if results else "",
        x_label="round",
        y_label=label,
        lines=lines,
        levels=levels,
        marks=sorted(marks),
    )


def _splits(data: Data) -> list[float]:
    """Return the rounds of a result's splits, which are numbers or objects with a round."""
    named = data.get("splits")
    if not isinstance(named, Sequence):
        return []
    rounds = [s.get("round") if isinstance(s, Mapping) else s for s in named]
    return [float(r) for r in rounds if isinstance(r, int | float)]


def _line(label: str, pairs: Sequence[tuple[float, float]]) -> Line:
    return Line(label, [x for x, _ in pairs], [y for _, y in pairs])


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _families(results: Sequence[Data], prefix: str) -> tuple[list[Line], str]:
    """Return a line for each algorithm and key that starts with ``prefix``, and its axis: samples, or rounds."""
    lines = []
    axis = "samples" if any("samples" in row for data in results for row in data["history"]) else "round"
    for data in results:
        keys = dict.fromkeys(k for row in data["history"] for k in row if k.startswith(prefix))
        for key in keys:
            pairs = [(r[axis], r[key]) for r in data["history"] if _number(r.get(key)) and _number(r.get(axis))]
            if pairs:
                name = key.removeprefix(prefix).strip("_") or prefix
                label = name if len(results) == 1 else f"{data['algorithm']}, {name}"
                lines.append(_line(label, pairs))
    return lines, axis


def _gap(results: Sequence[Data]) -> Iterator[Panel]:
    lines, axis = _families(results, "gap")
    label = "samples a device" if axis == "samples" else axis
    yield Panel(
        title=str(results[0]["experiment"]),
        x_label=label,
        y_label="separation gap",
        lines=lines,
        levels={"no gap": 0.0} if lines else {},
    )


def _clusters(results: Sequence[Data]) -> Iterator[Panel]:
    """Yield a panel of accuracy, and one of the gap within each cluster: ``gaps`` of a row, by cluster id (CFL, Fig. 8)."""
    yield _over_rounds(results, "accuracy", "test accuracy, %", published=True)
    for data in results:
        rows = [(row["round"], row["gaps"]) for row in data["history"] if isinstance(row.get("gaps"), Mapping)]
        lines = [
            _line(f"cluster {key}", [(x, gaps[key]) for x, gaps in rows if _number(gaps.get(key))])
            for key in dict.fromkeys(key for _, gaps in rows for key in gaps)
        ]
        yield Panel(
            title=f"{data['algorithm']}, by cluster",
            x_label="round",
            y_label="separation gap",
            lines=lines,
            levels={"no gap": 0.0} if lines else {},
            marks=_splits(data),
        )


def _norms(results: Sequence[Data]) -> Iterator[Panel]:
    for data in results:
        lines, axis = _families([data], "norm")
        yield Panel(
            title=str(data["algorithm"]),
            x_label=axis,
            y_label="norm of the update",
            lines=lines,
            levels={},
            logarithmic=True,
        )


def _curves(name: str, points: Iterable[tuple[float, float, float]]) -> list[Line]:
    """Return a line for each first value, called ``name``, of the points (value, x, y)."""
    groups: dict[float, list[tuple[float, float]]] = defaultdict(list)
    for value, x, y in points:
        groups[value].append((x, y))
    return [_line(f"{name} = {value:g}", sorted(pairs)) for value, pairs in groups.items()]


def _success(results: Sequence[Data]) -> Iterator[Panel]:
    """Yield a panel for each curve of ``success``: {curve: {"axis", "line", "points": [{axis, line, "probability"}]}}."""
    for name, curve in (item for data in results for item in data["success"].items()):
        line, axis = curve["line"], curve["axis"]
        yield Panel(
            title=f"({name})",
            x_label=str(axis),
            y_label="chance of success",
            lines=_curves(line, ((point[line], point[axis], point["probability"]) for point in curve["points"])),
            levels={},
            chance=True,
        )


def _chance(results: Sequence[Data]) -> Iterator[Panel]:
    """Yield a panel with lines of ``chance`` over ``gamma``, one for each ``k`` (CFL, Fig. 3)."""
    for data in results:
        points = [tuple(map(row.get, ("k", "gamma", "chance"))) for row in data["history"]]
        yield Panel(
            title=str(data["experiment"]),
            x_label="gamma",
            y_label="chance of the right bipartition",
            lines=_curves("k", sorted(point for point in points if all(map(_number, point)))),
            levels={},
            chance=True,
        )


def _panels(results: Sequence[Data]) -> Iterator[Panel]:
    """Yield the experiment's own ``panels``, each with title, x_label, y_label and lines of label, x, y, dots."""
    for panel in (panel for data in results for panel in data.get("panels", ())):
        yield Panel(
            title=str(panel["title"]),
            x_label=str(panel["x_label"]),
            y_label=str(panel["y_label"]),
            lines=[Line(str(x["label"]), x["x"], x["y"], dots=bool(x.get("dots"))) for x in panel["lines"]],
            levels={},
        )


def _fleet(results: Sequence[Data]) -> Iterator[Panel]:
    """Yield accuracy (or loss) over rounds, and each strategy's devices, worst first, without and with their finish."""
    accuracy = results[0]["measure"] == "accuracy"
    label = "test accuracy, %" if accuracy else str(results[0]["measure"])
    over = _over_rounds(results, "accuracy" if accuracy else "test_loss", label)
    yield dataclasses.replace(over, title=str(results[0]["scenario"]))
    for key, title in (("plain", "each device, its cluster's model"), ("personal", "each device, personal finish")):
        ranked = {str(data["algorithm"]): sorted(data["by_device"][key], reverse=not accuracy) for data in results}
        lines = [_line(name, list(enumerate(values, 1))) for name, values in ranked.items()]
        yield Panel(title=title, x_label="device, worst first", y_label=label, lines=lines, levels={})


_KINDS: Final[dict[str, Callable[[Sequence[Data]], Iterable[Panel]]]] = {
    "accuracy": lambda results: [_over_rounds(results, "accuracy", "test accuracy, %", published=True)],
    "identity": lambda results: [
        _over_rounds(results, "purity", "devices in their group's cluster, %", scale=100.0),
        _over_rounds(results, "accuracy", "test accuracy, %", published=True),
    ],
    "perplexity": lambda results: [_over_rounds(results, "perplexity", "perplexity", published=True)],
    "gap": _gap,
    "clusters": _clusters,
    "norms": _norms,
    "success": _success,
    "chance": _chance,
    "panels": _panels,
    "fleet": _fleet,
}
