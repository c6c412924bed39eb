"""Run one strategy on one scenario with a fleet's defaults, and measure every device with and without its personal finish."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.strategies.base import Event
from shoal.errors import UsageError
from shoal.protocol.recipe import DEFAULTS, Recipe
from shoal.simulation.data import Population
from shoal.simulation.engine import personal
from shoal.simulation.engine.fleet import fleet_options, fleet_run
from shoal.simulation.engine.metrics import adjusted_rand
from shoal.simulation.engine.personal import Personal, drawn_start
from shoal.simulation.engine.simulate import Observation, SimResult, SimRound, simulate
from shoal.simulation.trainers.networks import origins
from shoal.util.console import counted
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study
from shoal_lab.experiments.wild import images, scenarios, tables
from shoal_lab.experiments.wild.fleets import Fleet

EVALUATIONS: Final = 10
"""Rounds of a run in which accuracy is measured, evenly spread."""
STILL_ROUNDS: Final = 10
"""A cluster stands still if its model did not change in this many last rounds."""
LOCAL: Final = "local"
TRUE_GROUPS: Final = "true-groups"
GIVEN_GROUPS: Final[Mapping[str, str]] = {"fesem": "k"}
"""The setting for the number of groups, of strategies that can't find it themselves."""
FEWEST_GROUPS: Final = 2
"""Number of groups that these strategies are given where there are none."""
SHOWN: Final = (
    "k",
    "silhouette",
    "gain",
    "sizes",
    "cluster",
    "children",
    "device",
    "prefer",
    "margin",
    "p_value",
    "least",
    "groups",
    "models",
    "reason",
)
"""Details of an event that a result holds."""
UNREPORTED_EVENTS: Final = frozenset({"discrepancy", "norms"})


@dataclass(frozen=True, slots=True)
class _Ended:
    """One finished run.

    Attributes:
        done: the simulator's result.
        models: the id of the model that each device takes in the end, shape (devices,).
        thetas: these models, shape (devices, d).
        still: devices whose model did not change in the last `STILL_ROUNDS` rounds.
    """

    done: SimResult
    models: NDArray[np.int64]
    thetas: NDArray[np.float32]
    still: int


def run(study: Study, options: Options, progress: Progress) -> Result:
    """Run one algorithm on ``options.scenario``."""
    if options.scenario is None:
        raise UsageError("which scenario?", hint="shoal simulate wild --list names them; give one with --scenario")
    scenario, values, rounds = scenarios.find(options.scenario), options.values, options.rounds or 0
    algorithm, settings = options.algorithm, dict(options.settings)
    if values["test_images"] < 1:
        raise UsageError(f"{values['test_images']} test_images", hint="every device is tested: give at least 1")
    progress.stage(f"dealing {options.scenario}")
    fleet = fleet_of(options.scenario, options.seed, options.data_dir, options.samples, values["test_images"])
    given = GIVEN_GROUPS.get(algorithm)
    if given is not None and values["given_groups"]:
        settings = {given: str(max(FEWEST_GROUPS, number_of_groups(fleet.last))), **settings}
    chosen = fleet_run(
        "fedavg" if algorithm == TRUE_GROUPS else algorithm,
        settings,
        min_contributors=values["min_contributors"] or scenario.min_contributors,
        robust=values["robust"] or DEFAULTS.robust,
    )
    progress.stage(f"{algorithm}: {counted(len(fleet.population), 'device')}, {counted(rounds, 'round')}")

    def told(closed: SimRound) -> None:
        progress.round(algorithm, closed.round, rounds, closed.as_dict() | {"clusters": closed.clusters})

    everybody = np.arange(len(fleet.population))
    if algorithm == LOCAL:
        # A device that trains alone sends nothing, so there is no mask.
        parts = [(everybody, _train(fleet, fleet_run(LOCAL, {}), 1.0, rounds, Options(seed=options.seed), None))]
    elif algorithm == TRUE_GROUPS:
        parts = _true_groups(fleet, chosen, scenario.participation, rounds, options)
    else:
        parts = [(everybody, _train(fleet, chosen, scenario.participation, rounds, options, told))]
    return _result(study, options, fleet, parts, chosen)


def number_of_groups(population: Population) -> int:
    """Return how many true groups the sound devices form."""
    assert population.groups is not None
    return len(set(population.groups) - {scenarios.NO_GROUP})


@functools.lru_cache(maxsize=1)
def fleet_of(name: str, seed: int, data_dir: Path | None, samples: int | None, test_images: int) -> Fleet:
    """Return the fleet of a scenario, of which the latest is cached.

    Raises:
        UsageError: there is no such scenario, or devices get too few images.
        MissingDataError: its files are not here.
    """
    scenario = scenarios.find(name)
    if scenario.data in scenarios.NATURAL:
        return tables.deal_real(scenario, seed=seed, data_dir=data_dir)
    if not scenario.needs:
        return tables.deal(scenario, seed=seed)
    return images.deal(scenario, seed=seed, data_dir=data_dir, samples=samples, test_images=test_images)


def _train(fleet: Fleet, chosen: Recipe, participation: float, rounds: int, options: Options, told: Any) -> _Ended:
    """Run a strategy, with the fleet's later data from the middle of the run on."""

    def watch(seen: Observation) -> None:
        if fleet.later is not None and seen.round == rounds // 2:
            seen.workforce.use_data(fleet.later)

    sim_options = fleet_options(
        chosen,
        rounds=rounds,
        local=fleet.local,
        seed=options.seed,
        participation=participation,
        mode=options.mask,
        device=options.device,
        threads=options.threads,
        evaluate_every=max(1, rounds // EVALUATIONS),
    )
    done = simulate(
        chosen.algorithm,
        chosen.values,
        fleet.population,
        fleet.network,
        sim_options,
        told,
        watch=watch,
        declared=fleet.declared,
    )
    taken, final = done.taken(), done.final_plan()
    still = sum(done.all_rounds - final.models[int(model)].version >= STILL_ROUNDS for model in taken)
    thetas = np.stack([done.thetas[int(model)] for model in taken])
    return _Ended(done, taken, thetas, still)


_Part = tuple[NDArray[np.int64], _Ended]
"""Some of the devices: their data, their places in the whole fleet, and their run."""


def _true_groups(fleet: Fleet, chosen: Recipe, participation: float, rounds: int, options: Options) -> list[_Part]:
    """Run FedAvg within each true group; if groups change, on the later data, for the rounds that these are in use.

    A mean has the fleet's fewest devices, or all that a group has in a round if these are fewer.
    """
    data = fleet.last
    assert data.groups is not None
    groups = np.array(data.groups)
    parts: list[_Part] = []
    for group in sorted(set(data.groups)):
        places = np.flatnonzero(groups == group)
        part = dataclasses.replace(fleet, population=data.of(places), later=None)
        present = max(1, round(participation * len(places)))
        own = dataclasses.replace(chosen, min_contributors=min(chosen.min_contributors, present))
        length = rounds if fleet.later is None else max(1, rounds - rounds // 2)
        parts.append((places, _train(part, own, participation, length, options, None)))
    return parts


def _spread(figures: Mapping[str, NDArray[np.float64]], of: NDArray[np.bool_], kind: str) -> dict[str, float]:
    """Return the mean over some devices and the worst of them, of each of the figures by prefix."""
    measures: dict[str, Callable[..., Any]] = {"mean": np.mean, "worst": np.max if kind == "regression" else np.min}
    return {
        f"{name}{what}": float(measure(values[of]))
        for name, values in figures.items()
        for what, measure in measures.items()
    }


def _measure(
    parts: Sequence[_Part], fleet: Fleet, seed: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], list[str], NDArray[np.int64]]:
    """Return each device's figure by its cluster's model, the one after the personal finish, its choice there, and its model."""
    count, kind = len(fleet.population), fleet.network.kind
    fresh = drawn_start(fleet.network, origins(fleet.network, 1, seed)[0], seed)
    plain, own, clusters = np.empty(count), np.empty(count), np.empty(count, np.int64)
    choices = [""] * count
    for number, (places, ended) in enumerate(parts):
        workforce, round_ = ended.done.workforce, ended.done.all_rounds + 1
        plain[places] = _figures(personal.measure(workforce, ended.thetas), kind)
        finished = personal.finish(workforce, ended.thetas, round_, fresh)
        own[places] = _figures(finished, kind)
        # Runs within single groups number their models from 0 each.
        clusters[places] = ended.models if len(parts) == 1 else number
        for place, choice in zip(places, finished.choices, strict=True):
            choices[int(place)] = choice
    return plain, own, choices, clusters


def _figures(found: Personal, kind: str) -> NDArray[np.float64]:
    """Return each device's accuracy in percent, or for regression its squared error."""
    return found.losses if kind == "regression" else 100.0 * found.correct / found.tested


def _result(study: Study, options: Options, fleet: Fleet, parts: Sequence[_Part], chosen: Recipe) -> Result:
    kind, algorithm = fleet.network.kind, options.algorithm
    plain, own, choices, clusters = _measure(parts, fleet, options.seed)
    groups, figures = fleet.last.groups, {"": plain, "personal_": own}
    assert groups is not None
    # Faulty devices stay in the population's first data: fleets with faults do not change.
    sound = np.array([group != scenarios.NO_GROUP for group in groups])
    extra: dict[str, Any] = {
        "scenario": options.scenario,
        "strategy": algorithm,
        "seed": options.seed,
        "measure": "squared error" if kind == "regression" else "accuracy",
        **_spread(figures, np.full(len(groups), True), kind),
    }
    if not sound.all():
        extra["sound"] = _spread(figures, sound, kind)
    events = [event for _, ended in parts for event in ended.done.events] if algorithm != TRUE_GROUPS else []
    extra |= {
        "standing_still": sum(ended.still for _, ended in parts),
        "choices": dict(sorted(Counter(choices).items())),
        "of_groups": {str(group): float(plain[np.array(groups) == group].mean()) for group in sorted(set(groups))},
        "events": _events(events),
        "by_device": {"groups": groups, "plain": plain.round(3), "personal": own.round(3)},
    }
    scenario = scenarios.find(options.scenario or "")
    labels, truth = clusters[sound].tolist(), np.array(groups)[sound].tolist()
    shares = {"train": fleet.population.train, "validation": fleet.population.validation, "test": fleet.population.test}
    return study.result(
        options,
        {
            "title": scenario.title,
            "data": scenario.data,
            "devices": len(fleet.population),
            "groups": number_of_groups(fleet.last),
            "network": repr(fleet.network),
            "coordinates": fleet.network.length,
            **{name: sorted({len(s) for s in share}) for name, share in shares.items()},
            "participation": scenario.participation if algorithm != LOCAL else 1.0,
            "robust": chosen.robust,
            "min_contributors": [ended.done.run.recipe.min_contributors for _, ended in parts],
            "epochs": fleet.local.epochs,
            "batch_size": fleet.local.batch_size,
            "lr": fleet.local.lr,
            "settings": chosen.values,
        },
        accuracy=None if kind == "regression" else extra["mean"],
        clusters=len(set(labels)),
        cpu_seconds_per_round=sum(ended.done.cpu_seconds_per_round for _, ended in parts),
        history=_history([ended for _, ended in parts], [len(places) for places, _ in parts], kind),
        ari=adjusted_rand(labels, truth),
        extra=extra,
    )


def _events(events: Sequence[tuple[int, Event]]) -> list[dict[str, Any]]:
    return [
        {"round": round_, "kind": event.kind, **{k: _short(event.detail[k]) for k in SHOWN if k in event.detail}}
        for round_, event in events
        if event.kind not in UNREPORTED_EVENTS
    ]


def _short(value: Any) -> Any:
    """Return numbers with three significant digits; a p value of 1e-9 stays one."""
    if isinstance(value, list | tuple):
        return [_short(v) for v in value]
    return float(f"{value:.3g}") if isinstance(value, float) else value


def _history(runs: Sequence[_Ended], sizes: Sequence[int], kind: str) -> list[dict[str, Any]]:
    """Return the evaluated rounds, as means over several runs weighted by their devices."""
    weights = np.array(sizes) / sum(sizes)
    rows = []
    for closed in zip(*(ended.done.history for ended in runs), strict=True):
        if closed[0].accuracy is None:
            continue
        row: dict[str, Any] = {"round": closed[0].round}
        for name in ("accuracy", "test_loss"):
            values = [getattr(one, name) for one in closed]
            row[name] = None if None in values else round(float(np.dot(weights, values)), 4)
        if kind == "regression":
            row["accuracy"] = None
        rows.append({**row, "clusters": sum(c.clusters for c in closed)})
    return rows
