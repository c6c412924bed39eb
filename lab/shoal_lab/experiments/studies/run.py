"""Run a study that is a table: deal its data, simulate an algorithm, and measure it.

A table's ``measure`` says what is measured and how it becomes a result:

- ``splits``: every round of CFL or its baseline, and each of its splits (`shoal_lab.experiments.studies.watch`)
- ``best-round``: the best round over the devices that have a group (`shoal_lab.experiments.studies.watch`)
- ``starts``: the last round, and the random starts before it (`shoal_lab.experiments.studies.watch`)

A method without a strategy trains each device alone.

`heterogeneity` runs a table once for each number of classes (Duan et al., section III-A, Table I).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import numpy as np

from shoal.errors import UsageError
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.engine.simulate import SimRound, simulate
from shoal.util.console import counted
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study, one_of
from shoal_lab.experiments.common.paper import paper_options
from shoal_lab.experiments.studies.alone import train_alone
from shoal_lab.experiments.studies.tasks import TASKS, Task
from shoal_lab.experiments.studies.watch import CflWatch, Scores, Starts

RECIPE: Final = tuple(f.name for f in dataclasses.fields(LocalTraining))
SIMULATED: Final = ("weighting", "protocol", "trainer", "count", "deferred")
"""Values of a study that are options of the simulator."""


Measure = CflWatch | Scores | Starts
"""Measures a run, by the rounds that it is called with if it can be called, and at the end; see `watch`."""


MEASURES: Final[Mapping[str, Callable[[Options, Task, Mapping[str, Any]], Measure]]] = {
    "splits": lambda options, task, method: CflWatch(
        task.population.groups or (0,) * len(task.population),
        options.values["evaluate_every"],
        splits=method.get("clusters", False),
    ),
    "best-round": lambda options, _, method: Scores(
        everybody=method.get("tests_all", False), every=options.values["evaluate_every"], rounds=options.rounds or 0
    ),
    "starts": lambda options, _, method: Starts(
        options.values["evaluate_every"], clusters=method.get("clusters", False)
    ),
}


def run(study: Study, options: Options, progress: Progress) -> Result:
    """Run one algorithm of a study.

    Raises:
        UsageError: the table names no task or measure, or lacks a value that they need.
    """
    if not options.rounds:
        raise UsageError("how many rounds?", hint="give --rounds, or rounds = ... in the study's table")
    progress.stage(f"dealing the data of {study.id}")
    task = TASKS[one_of("task", study.task, TASKS)](options)
    method, values, count = study.methods.get(options.algorithm, {}), options.values, len(task.population)
    rounds, local = options.rounds, local_of(values)
    participation = values.get("participation", min(1.0, values.get("cohort", count) / count))
    progress.stage(f"{options.algorithm}: {counted(count, 'device')}, {counted(rounds, 'round')}")
    parameters = {"network": repr(task.network), "coordinates": task.network.length}
    parameters |= {"devices": count, "participation": participation, **task.parameters}
    if "strategy" not in method:
        return _alone(study, options, progress, task, local, max(1, round(rounds * participation)), parameters)
    settings = _settings(options, method)
    measure = MEASURES[one_of("measure", study.measure, MEASURES)](options, task, method)

    def told(closed: SimRound) -> None:
        record = closed.as_dict() | {"clusters": closed.clusters, **measure.latest()}
        progress.round(options.algorithm, closed.round, rounds, record)

    sim_options = paper_options(
        rounds=rounds,
        local=local,
        pretrain=pretraining(values, local),
        seed=options.seed,
        mode=options.mask,
        participation=participation,
        evaluate_every=measure.evaluate_every,
        segments=task.segments if method.get("shares_layers") else (),
        device=options.device,
        threads=options.threads,
        checkpoint=options.checkpoint,
        **{name: values[name] for name in SIMULATED if name in values},
    )
    watch: Any = measure if callable(measure) else None
    done = simulate(method["strategy"], settings, task.population, task.network, sim_options, told, watch=watch)
    parameters |= {"strategy": method["strategy"], "settings": settings}
    return study.result(options, parameters, cpu_seconds_per_round=done.cpu_seconds_per_round, **measure.figures(done))


def local_of(values: Mapping[str, Any]) -> LocalTraining:
    """Return the recipe of a round; ``mu`` is the weight of its proximal term."""
    return LocalTraining(**{name: values[name] for name in RECIPE if name in values}, prox_mu=values.get("mu", 0.0))


def pretraining(values: Mapping[str, Any], local: LocalTraining) -> LocalTraining | None:
    """Return the recipe before the first round, by ``pretrain_epochs`` or ``pretrain_steps``; it has no proximal term."""
    epochs, steps = values.get("pretrain_epochs", 0), values.get("pretrain_steps", 0)
    return dataclasses.replace(local, epochs=epochs, steps=steps, prox_mu=0.0) if epochs or steps else None


def _settings(options: Options, method: Mapping[str, Any]) -> dict[str, str]:
    """Return the strategy's settings.

    Without validation a method's tests may be stricter. All random starts but the best one are dropped after some rounds; a
    single start is never dropped, and a run too short to drop any has one.
    """
    settings = dict(options.settings)
    if settings.get("validate", "on").lower() in ("off", "false"):
        settings = {**method.get("without_validation", {}), **settings}
    if "restarts" in settings:
        most = (options.rounds or 0) - 1
        settings["restart_rounds"] = str(min(int(settings["restart_rounds"]), most))
        if most < 1 or settings["restarts"] == "1":
            del settings["restart_rounds"]
        if most < 1:
            del settings["restarts"]
    return settings


def _alone(
    study: Study,
    options: Options,
    progress: Progress,
    task: Task,
    local: LocalTraining,
    rounds: int,
    parameters: Mapping[str, Any],
) -> Result:
    """Train each device alone, for as many rounds as it would take part in."""
    count = len(task.population)
    ended = train_alone(
        task.population,
        task.network,
        local,
        rounds=rounds,
        seed=options.seed,
        told=lambda devices: progress.round(options.algorithm, devices, count, None),
        threads=options.threads,
    )
    tested = ended.accuracies[np.isfinite(ended.accuracies)]
    accuracy = float(tested.mean()) if len(tested) else None
    return study.result(
        options,
        {**parameters, "mask": "nothing leaves a device"},
        accuracy=accuracy,
        clusters=count,
        rounds=rounds,
        cpu_seconds_per_round=ended.seconds_cpu / rounds,
        history=[{"round": rounds, "accuracy": accuracy, "loss": float(ended.losses.mean()), "purity": None}],
        extra={"accuracy_spread": float(tested.std()) if len(tested) else None},
    )


TARGET: Final = 85.0


def heterogeneity(study: Study, options: Options, progress: Progress) -> Result:
    """Run FedAvg on each split, with Table I's figures of each."""
    runs: dict[str, Result] = {}
    for classes in map(int, study.published[options.algorithm]):
        progress.stage(f"{classes} classes a device")
        split = dataclasses.replace(options, values={**options.values, "classes": classes})
        runs[str(classes)] = run(study, split, progress)
    history = [
        {"round": rows[0]["round"], "accuracy": None, "loss": None, "purity": None}
        | {f"accuracy_{c}": row["accuracy"] for c, row in zip(runs, rows, strict=True)}
        | {f"discrepancy_{c}": row.get("discrepancy_after") for c, row in zip(runs, rows, strict=True)}
        for rows in zip(*(one["history"] for one in runs.values()), strict=True)
    ]
    return study.result(
        options,
        {**next(iter(runs.values()))["parameters"], "classes": list(runs)},
        accuracy=None,
        clusters=1,
        cpu_seconds_per_round=sum(r["cpu_seconds_per_round"] for r in runs.values()) / len(runs),
        history=history,
        extra={
            "classes": {c: figures(one["history"]) for c, one in runs.items()},
            "populations": {c: one["population"] for c, one in runs.items()},
            "panels": _panels(history, tuple(runs)),
        },
    )


def figures(history: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Return Table I's figures of one run.

    Over its rounds: the accuracy's maximum and median, the first of at least 85 %, the discrepancy's mean and variance, measured
    from the model after the round (``discrepancy``) and from the one before it (``discrepancy_before``).
    """
    tested = [(row["round"], row["accuracy"]) for row in history if row["accuracy"] is not None]
    accuracies = [a for _, a in tested]
    found: dict[str, float | None] = {
        "max": float(np.max(accuracies)),
        "median": float(np.median(accuracies)),
        "rounds_to_85": next((r for r, a in tested if a >= TARGET), None),
    }
    for name, key in (("discrepancy", "discrepancy_after"), ("discrepancy_before", "discrepancy")):
        values = [row[key] for row in history if row.get(key) is not None]
        found[f"{name}_mean"] = float(np.mean(values)) if values else None
        found[f"{name}_variance"] = float(np.var(values)) if values else None
    return found


def _panels(history: Sequence[Mapping[str, Any]], counts: tuple[str, ...]) -> list[dict[str, Any]]:
    """Fig. 1: accuracy and discrepancy over rounds."""
    panels = []
    for key, label in (("accuracy", "test accuracy, %"), ("discrepancy", "discrepancy")):
        lines = []
        for c in counts:
            pairs = [(row["round"], row[f"{key}_{c}"]) for row in history if row[f"{key}_{c}"] is not None]
            lines.append({"label": f"{c} classes", "x": [x for x, _ in pairs], "y": [y for _, y in pairs]})
        panels.append({"title": f"fedgroup-heterogeneity: {key}", "x_label": "round", "y_label": label, "lines": lines})
    return panels
