"""fedgroup-heterogeneity: FedAvg on MNIST with four numbers of classes a device (Duan et al., section III-A, Table I)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np

from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study
from shoal_lab.experiments.studies import run as tables

TARGET: Final = 85.0


def run(study: Study, options: Options, progress: Progress) -> Result:
    """Run FedAvg on each split, with Table I's figures of each."""
    runs: dict[str, Result] = {}
    for classes in map(int, study.published[options.algorithm]):
        progress.stage(f"{classes} classes a device")
        split = dataclasses.replace(options, values={**options.values, "classes": classes})
        runs[str(classes)] = tables.run(study, split, progress)
    history = [
        {"round": rows[0]["round"], "accuracy": None, "loss": None, "purity": None}
        | {f"accuracy_{c}": row["accuracy"] for c, row in zip(runs, rows, strict=True)}
        | {f"discrepancy_{c}": row.get("discrepancy_after") for c, row in zip(runs, rows, strict=True)}
        for rows in zip(*(one.history for one in runs.values()), strict=True)
    ]
    return study.result(
        options,
        {**next(iter(runs.values())).parameters, "classes": list(runs)},
        accuracy=None,
        clusters=1,
        cpu_seconds_per_round=sum(r.cpu_seconds_per_round for r in runs.values()) / len(runs),
        history=history,
        extra={
            "classes": {c: figures(one.history) for c, one in runs.items()},
            "populations": {c: one.extra["population"] for c, one in runs.items()},
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
