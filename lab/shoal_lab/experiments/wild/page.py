"""The tables of docs/wild-fleets.md, generated from the files in results/.

``python -m shoal_lab.experiments.wild.page`` prints them; ``--write`` puts them between the page's marks. A test compares both.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from shoal_lab.experiments import table
from shoal_lab.experiments.pages import put_between
from shoal_lab.experiments.wild.scenarios import KINDS, SCENARIOS, Scenario

PAGE: Final = table.ROOT / "docs" / "wild-fleets.md"
MARK: Final = "<!-- {}: python -m shoal_lab.experiments.wild.page --write -->"
END: Final = "<!-- end of {} -->"
COLUMNS: Final = {
    "fedavg": "FedAvg",
    "local": "local",
    "true-groups": "true groups",
    "cfl": "CFL",
    "ifca": "IFCA",
    "fedgroup": "FedGroup",
    "fesem": "FeSEM",
    "one-shot": "one-shot",
}
CHOICES: Final = ("fedavg", "local", "cfl", "ifca", "fedgroup", "one-shot")
"""Strategies of a fleet that need not be told the number of groups."""
DECIMALS: Final = {"accuracy": (1, 0), "squared error": (2, 2)}
"""Decimals of the mean and of the worst device."""
BEHIND_PEERS: Final = 0.5
"""Points that the personal mean may be below FedAvg with the same finish, and below local training."""
BEHIND_TRUE_GROUPS: Final = 1.5
BEHIND_LOCAL_WORST: Final = 2.0
BEHIND_FEDAVG: Final = 0.3
"""Points that the clusters' models may be below FedAvg's where there are no groups."""
ERROR_SHARE: Final = 0.05
"""Share by which a squared error may be larger, in place of points of accuracy."""

Runs = Mapping[str, Sequence[Mapping[str, Any]]]
"""The results of one scenario: strategy -> one mapping a seed."""


Figures = Mapping[str, Any]
"""Means over the seeds of one strategy's figures, and the lists ``aris``, ``clusters`` and ``still`` of each seed's."""
MEANS: Final = ("mean", "worst", "personal_mean", "personal_worst")


def load(folder: Path = table.RESULTS) -> dict[str, Runs]:
    """Return the kept results in ``folder`` by scenario and strategy, in the order of the scenarios and of the seeds."""
    found: dict[str, dict[str, list[Mapping[str, Any]]]] = defaultdict(lambda: defaultdict(list))
    kept = [run.data for run in table.load_all(folder) if run.data["experiment"] == "wild"]
    for data in sorted(kept, key=lambda data: int(data["seed"])):
        found[data["scenario"]][data["strategy"]].append(data)
    return {name: found[name] for name in SCENARIOS if name in found}


def figures(runs: Sequence[Mapping[str, Any]]) -> Figures:
    """Return the means over the runs of one strategy; faulty devices are left out."""
    sound = [run.get("sound", run) for run in runs]
    means = {name: sum(float(one[name]) for one in sound) / len(sound) for name in MEANS}
    lists = {"aris": "ari", "clusters": "clusters", "still": "standing_still"}
    return means | {name: [run[key] for run in runs] for name, key in lists.items()}


def models_table(results: Mapping[str, Runs]) -> str:
    """Return the table of the clusters' own models: mean and worst device, and the clusters that CFL found."""
    head = [*COLUMNS.values(), "CFL: clusters, ARI"]
    return _table(results, head, lambda f: (f["mean"], f["worst"]), _found)


def personal_table(results: Mapping[str, Runs]) -> str:
    """Return the table of the models that devices choose at the end: mean and worst device."""
    return _table(results, list(COLUMNS.values()), lambda f: (f["personal_mean"], f["personal_worst"]), None)


def _table(
    results: Mapping[str, Runs],
    head: Sequence[str],
    of: Callable[[Figures], tuple[float, float]],
    more: Callable[[Figures], str] | None,
) -> str:
    lines = [f"| fleet (seeds) | {' | '.join(head)} |", "|---" * (len(head) + 1) + "|"]
    kind = ""
    for name, runs in results.items():
        if SCENARIOS[name].kind != kind:
            kind = SCENARIOS[name].kind
            lines.append(f"| **{KINDS[kind]}** |" + " |" * len(head))
        cells = []
        seeds = max(len(of_strategy) for of_strategy in runs.values())
        for strategy in COLUMNS:
            if strategy not in runs:
                cells.append("-")
                continue
            mean, worst = DECIMALS[runs[strategy][0]["measure"]]
            values = of(figures(runs[strategy]))
            fewer = f" ({len(runs[strategy])})" if len(runs[strategy]) < seeds else ""
            cells.append(f"{values[0]:.{mean}f} / {values[1]:.{worst}f}{fewer}")
        if more is not None:
            cells.append(more(figures(runs["cfl"])) if "cfl" in runs else "-")
        lines.append(f"| `{name}`: {SCENARIOS[name].title} ({seeds}) | {' | '.join(cells)} |")
    return "\n".join(lines)


def _found(found: Figures) -> str:
    return f"{' '.join(map(str, found['clusters']))}; {' '.join(f'{ari:.2f}' for ari in found['aris'])}"


def same_seeds(runs: Runs, strategies: Sequence[str]) -> tuple[Figures, ...] | None:
    """Return the strategies' figures over the seeds that all of them have; None if there is no such seed."""
    seeds = set.intersection(*({run["seed"] for run in runs.get(s, ())} for s in strategies))
    if not seeds:
        return None
    return tuple(figures([run for run in runs[s] if run["seed"] in seeds]) for s in strategies)


def _kinds(
    results: Mapping[str, Runs], strategies: Sequence[str]
) -> Iterator[tuple[str, int, list[float], list[float]]]:
    """Yield each kind's title and number of fleets, and each strategy's mean and worst accuracy over them, with the finish.

    Fleets of regression are left out, and those without a seed that every strategy has.
    """
    for kind, title in KINDS.items():
        fleets = [
            found
            for name, runs in results.items()
            if SCENARIOS[name].kind == kind
            and all(run["measure"] == "accuracy" for of_strategy in runs.values() for run in of_strategy)
            and (found := same_seeds(runs, strategies)) is not None
        ]
        if fleets:
            columns = list(zip(*fleets, strict=True))
            means, worst = (
                [sum(one[name] for one in column) / len(fleets) for column in columns]
                for name in ("personal_mean", "personal_worst")
            )
            yield title, len(fleets), means, worst


def kinds_table(results: Mapping[str, Runs]) -> str:
    """Return the mean accuracy with the finish over the fleets of each kind, as docs/results.md has it: see `_kinds`."""
    rows = [
        f"| {title} | {fleets} | {' | '.join(f'{mean:.1f}' for mean in means)} |"
        for title, fleets, means, _ in _kinds(results, tuple(COLUMNS))
    ]
    head = [f"| kind of fleet | fleets | {' | '.join(COLUMNS.values())} |", "|---" * (len(COLUMNS) + 2) + "|"]
    return "\n".join([*head, *rows])


def choice_table(results: Mapping[str, Runs]) -> str:
    """Return mean and worst accuracy of each algorithm that a fleet can run, and which are best, for docs/which-algorithm.md."""
    names = [COLUMNS[strategy] for strategy in CHOICES]
    lines = [f"| your fleet has | fleets | {' | '.join(names)} | take |", "|---" * (len(names) + 3) + "|"]
    for title, fleets, means, worst in _kinds(results, CHOICES):
        cells = [f"{mean:.1f} / {least:.0f}" for mean, least in zip(means, worst, strict=True)]
        best = [name for name, mean in zip(names, means, strict=True) if mean >= max(means) - BEHIND_PEERS]
        lines.append(f"| {title} | {fleets} | {' | '.join(cells)} | {', '.join(best)} |")
    return "\n".join(lines)


def misses_table(results: Mapping[str, Runs]) -> str:
    """Return the table of the fleets on which CFL, IFCA or FedGroup are worse than they should be, and by how much."""
    rows = [
        f"| `{name}` | {COLUMNS[strategy]} | {'; '.join(found)} |"
        for name, runs in results.items()
        for strategy in FINDS_NUMBER
        if (found := list(misses(SCENARIOS[name], runs, strategy)))
    ]
    return "\n".join(["| fleet | strategy | worse than it should be |", "|---|---|---|", *rows])


def misses(scenario: Scenario, runs: Runs, strategy: str) -> Iterator[str]:
    """Yield each comparison that a strategy fails on a fleet, with both figures: means over the seeds that all runs have."""
    found = same_seeds(runs, (strategy, "fedavg", "local", "true-groups"))
    if found is None:
        return
    own, fedavg, local, truth = found
    error = runs[strategy][0]["measure"] != "accuracy"

    def worse(value: float, than: float, by: float) -> bool:
        return value > than * (1 + ERROR_SHARE) if error else value < than - by

    decimals = 2 if error else 1
    peers = {"FedAvg with the finish": fedavg["personal_mean"], "local training": local["mean"]}
    peer, best = min(peers.items(), key=lambda p: p[1]) if error else max(peers.items(), key=lambda p: p[1])
    checks = [
        ("mean with the finish", own["personal_mean"], peer, best, BEHIND_PEERS),
        ("mean with the finish", own["personal_mean"], "true groups", truth["mean"], BEHIND_TRUE_GROUPS),
        ("worst device with the finish", own["personal_worst"], "local training", local["worst"], BEHIND_LOCAL_WORST),
    ]
    if scenario.kind == "none":
        checks.append(("mean of the models", own["mean"], "FedAvg", fedavg["mean"], BEHIND_FEDAVG))
    for what, value, of, reference, by in checks:
        if worse(value, reference, by):
            yield f"{what} {value:.{decimals}f}, {of} {reference:.{decimals}f}"
    if any(own["still"]):
        yield f"devices whose model stands still: {' '.join(map(str, own['still']))}"


TABLES: Final[Mapping[str, Callable[[Mapping[str, Runs]], str]]] = {
    "models": models_table,
    "personal": personal_table,
    "misses": misses_table,
    "goals": lambda results: goals_table(results, COLUMNS),
}


def write(page: Path = PAGE) -> None:
    """Put every table between its marks on the page."""
    results = load()
    for name, made in TABLES.items():
        put_between(page, MARK.format(name), END.format(name), made(results))


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


def goals_table(results: Mapping[str, Mapping[str, Sequence[Run]]], columns: Mapping[str, str]) -> str:
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


if __name__ == "__main__":
    if sys.argv[1:] == ["--write"]:
        write()
    else:
        results = load()
        sys.stdout.write("\n\n".join(made(results) for made in TABLES.values()) + "\n")
