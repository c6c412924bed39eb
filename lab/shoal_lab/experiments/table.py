"""The table of results in docs/algorithms.md, generated from the files in results/.

``python -m shoal_lab.experiments.table`` prints it; ``--write`` puts it between the page's two marks. A test compares the two.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shoal.report import record
from shoal_lab.experiments import registry
from shoal_lab.experiments.common.paper import unlike_a_fleet
from shoal_lab.experiments.pages import put_between

ROOT: Final = Path(__file__).parents[3]
RESULTS: Final = ROOT / "results"
PAGE: Final = ROOT / "docs" / "algorithms.md"
BEGIN: Final = "<!-- results: python -m shoal_lab.experiments.table --write -->"
END: Final = "<!-- end of results -->"
DROPPED: Final = ("--seed", "--save", "--data-dir", "--plot", "--checkpoint")
"""Options that differ between runs of one setting, and are left out of the table's command."""
FLAGS: Final = ("--json",)
OTHER_PAGES: Final = frozenset({"wild"})
"""Experiments whose results have a page of their own."""


@dataclass(frozen=True, slots=True)
class Kept:
    """One run: its file, the words after ``simulate``, its seed and its data."""

    file: Path
    words: tuple[str, ...]
    seed: int
    data: Mapping[str, Any]


def load(folder: Path = RESULTS) -> list[Kept]:
    """Return the runs of the papers' experiments whose results are in ``folder``."""
    return [run for run in load_all(folder) if run.data["experiment"] not in OTHER_PAGES]


def load_all(folder: Path = RESULTS) -> list[Kept]:
    """Return the runs of all experiments whose results are in ``folder``."""
    found = []
    for file, document in record.load(folder):
        if "simulate" not in document["command"][:2]:
            continue
        words, seed = _words(document["command"][2:])
        data = document["data"]
        for one in data.get("results", [data]):
            found.append(Kept(file, words, seed, one))
    return found


def _words(command: Sequence[str]) -> tuple[tuple[str, ...], int]:
    words: list[str] = []
    seed, rest = 0, iter(command)
    for word in rest:
        name, sign, value = word.partition("=")
        if name in DROPPED:
            value = value if sign else next(rest)
            seed = int(value) if name == "--seed" else seed
        elif word not in FLAGS:
            words.append(word)
    return tuple(words), seed


def block(runs: Sequence[Kept]) -> str:
    """Return the table: a line for each setting, which lists its seeds."""
    lines = [
        "| `shoal simulate ...` | algorithm | published | ours, by seed | groups found (ARI) | not a fleet's default | file |",
        "|---|---|---|---|---|---|---|",
    ]
    groups: dict[tuple[int, tuple[str, ...], str], list[Kept]] = {}
    order = {name: i for i, name in enumerate(registry.ids())}
    for run in runs:
        key = (order[run.data["experiment"]], run.words, run.data["algorithm"])
        groups.setdefault(key, []).append(run)
    for (_, words, algorithm), same in sorted(groups.items()):
        same.sort(key=lambda r: r.seed)
        file = f"[{same[0].file.stem}](../{same[0].file.relative_to(ROOT)})"
        ours = _mean(same) + "; ".join(f"{r.seed}: {_ours(r.data)}" for r in same)
        figures = sorted(r.data["ari"] for r in same if r.data["ari"] is not None)
        found = list(dict.fromkeys(f"{figure:.2f}" for figure in figures))
        published = _published(same[0].data)
        shown = " to ".join(found[:: max(1, len(found) - 1)]) or "-"  # the first and the last of them
        unlike = unlike_a_fleet(same[0].data["parameters"])
        lines.append(f"| `{' '.join(words)}` | {algorithm} | {published} | {ours} | {shown} | {unlike} | {file} |")
    return "\n".join(lines)


def _mean(runs: Sequence[Kept]) -> str:
    """Return the mean accuracy over the seeds, which a published figure is compared with; empty for a single run."""
    found = [run.data["accuracy"] for run in runs]
    if len(found) < 2 or None in found or any(run.data.get("newcomers") for run in runs):
        return ""
    return f"mean {sum(found) / len(found):.2f}; "


def _ours(data: Mapping[str, Any]) -> str:
    if data.get("newcomers"):
        return f"{data['newcomers']['right']} of {data['newcomers']['tries']} right"
    if data["accuracy"] is not None:
        last = data.get("accuracy_last")
        return f"{data['accuracy']:.2f}" + (f" (last {last:.2f})" if last is not None else "")
    if CASES_AT_THE_END.keys() <= data.keys():
        return "; ".join(f"{case}: {_norms(data[name])}" for name, case in CASES_AT_THE_END.items())
    return next((say(data[name]) for name, say in SAYS.items() if name in data), "see file")


def _success(curves: Mapping[str, Any]) -> str:
    lines = [f"({name}) {line}" for name, curve in curves.items() for line, rises in curve["rises"].items() if rises]
    count = sum(len(curve["rises"]) for curve in curves.values())
    return f"rises on {len(lines)} of {count} lines"


def _classes(classes: Mapping[str, Mapping[str, float]]) -> str:
    return ", ".join(f"{c} {found['max']:.1f} / {found['median']:.1f}" for c, found in classes.items())


def _norms(end: Mapping[str, float]) -> str:
    return f"mean {end['mean_updates']:.1g}, largest {end['largest_updates']:.1g}"


CASES_AT_THE_END: Final = {"at_the_end_congruent": "congruent", "at_the_end_incongruent": "incongruent"}
"""Norms of updates in the last rounds of cfl-congruence."""

SAYS: Final[Mapping[str, Callable[[Any], str]]] = {
    "success": _success,
    "classes": _classes,
    "gap": lambda gap: f"gap {gap['updates']:.2f} with updates, {gap['gradients']:.2f} with gradients",
    "least_chance_k10_gamma1": lambda chance: f"at least {chance:.2f} at gamma 1 from k = 10",
}
"""Text of a cell for results without a single accuracy, by the key that their data have."""


def _published(data: Mapping[str, Any]) -> str:
    value = data["published"]
    if "classes" in data:
        return f"classes a device, max / median: {_classes(value)}"
    if isinstance(value, Mapping):
        return ", ".join(f"{k} {v}" for k, v in value.items())
    return "-" if value is None else str(value)


def write(page: Path = PAGE) -> None:
    """Put the table between the page's marks."""
    put_between(page, BEGIN, END, block(load()))


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        sys.stdout.write(block(load()) + "\n")
