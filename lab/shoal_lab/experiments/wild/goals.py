"""Goals for single fleets, and whether the kept results reach them. The comparisons that hold for all fleets are `page.misses`.

Example: eight groups of five devices have to be found early enough for 82 % after 50 of 100 rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

Run = Mapping[str, Any]

HALF: Final = 50
"""The round of the goals for runs of half the usual length."""


def figure(run: Run, of: str) -> float:
    """Return a figure of one run: a name in its data, or ``half`` for the clusters' models after `HALF` rounds.

    Raises:
        KeyError: the run was not measured in that round.
    """
    if of != "half":
        return float(run[of])
    for row in run["history"]:
        if row["round"] == HALF:
            return float(row["accuracy"])
    raise KeyError(f"no accuracy after round {HALF}")


@dataclass(frozen=True, slots=True)
class Goal:
    """A least figure for one fleet and strategy.

    Attributes:
        scenario: the fleet; strategy: its key, as in results.
        what: the figure in words; of: as `figure` has it.
        least: the figure to reach, as a mean over the seeds or, with ``every``, in each of them.
    """

    scenario: str
    strategy: str
    what: str
    of: str
    least: float
    every: bool = False

    def reached(self, runs: Sequence[Run]) -> bool:
        """Return whether at least one run reaches the goal, and they do together."""
        found = [figure(run, self.of) for run in runs]
        return bool(found) and (min(found) if self.every else sum(found) / len(found)) >= self.least


_AT_HALF: Final = f"the models after {HALF} rounds"
_MODELS: Final = "the models"
_WITH_FINISH: Final = "with the finish"
GOALS: Final = (
    Goal("permuted-8", "cfl", _AT_HALF, "half", 82.0),
    Goal("rotated-4", "cfl", _AT_HALF, "half", 82.0, every=True),
    Goal("part-0.2-of-20", "cfl", _MODELS, "mean", 80.0),
    Goal("part-0.2-of-20", "ifca", _MODELS, "mean", 78.0),
    Goal("part-0.2-of-20", "fedgroup", _MODELS, "mean", 78.0),
    Goal("part-0.2-of-20", "cfl", _WITH_FINISH, "personal_mean", 82.0),
    Goal("faulty-2-swapped", "cfl", "the models, faulty devices too", "mean", 79.0),
    Goal("faulty-2-swapped", "cfl", "adjusted Rand index", "ari", 1.0, every=True),
    Goal("unequal-14-4-2", "cfl", _WITH_FINISH, "personal_mean", 84.0),
    Goal("unequal-14-4-2", "cfl", "worst device with the finish", "personal_worst", 70.0),
    Goal("alike-dirichlet-0.1", "cfl", _WITH_FINISH, "personal_mean", 94.0),
)


CLEAR: Final = ("permuted-4", "rotated-4", "swapped-4-fashion", "permuted-2-of-4", "permuted-8")
"""Fleets whose groups differ clearly, each with `CLEAR_SEEDS` seeds."""
CLEAR_SEEDS: Final = 3
FEWEST_RIGHT: Final = 13
"""Of the clear fleets' runs, those in which a strategy has to find the right number of groups."""
ALIKE: Final = "alike"
"""The fleet without groups, on which one group has to be found in each of `ALIKE_SEEDS` seeds."""
ALIKE_SEEDS: Final = 5
FINDS_NUMBER: Final = ("cfl", "ifca", "fedgroup")


def table(results: Mapping[str, Mapping[str, Sequence[Run]]], columns: Mapping[str, str]) -> str:
    """Return the table of the goals, with the mean over the seeds and each seed's figure, and of how many groups are found.

    Args:
        results: scenario -> strategy -> one run a seed.
        columns: the strategies' names.
    """
    lines = ["| fleet | strategy | figure | at least | mean; by seed | reached |", "|---|---|---|---|---|---|"]
    for goal in GOALS:
        runs = results.get(goal.scenario, {}).get(goal.strategy, ())
        found = [figure(run, goal.of) for run in runs]
        ours = f"{sum(found) / len(found):.1f}; {' '.join(f'{one:.1f}' for one in found)}" if found else "-"
        least = f"{goal.least:.1f}{' in each seed' if goal.every else ''}"
        reached = ("yes" if goal.reached(runs) else "no") if found else "-"
        lines.append(f"| `{goal.scenario}` | {columns[goal.strategy]} | {goal.what} | {least} | {ours} | {reached} |")
    for strategy in FINDS_NUMBER:
        for names, seeds, fewest in ((CLEAR, CLEAR_SEEDS, FEWEST_RIGHT), ((ALIKE,), ALIKE_SEEDS, ALIKE_SEEDS)):
            runs = [run for name in names for run in results.get(name, {}).get(strategy, ())[:seeds]]
            right, all_ = sum(run["clusters"] == run["parameters"]["groups"] for run in runs), len(names) * seeds
            reached = "-" if len(runs) < all_ else "yes" if right >= fewest else "no"
            fleets = ", ".join(f"`{name}`" for name in names)
            ours = f"{right} of {len(runs)}" if runs else "-"
            lines.append(
                f"| {fleets} | {columns[strategy]} | right number of groups | {fewest} of {all_} | {ours} | {reached} |"
            )
    return "\n".join(lines)
