"""Results of experiments that were never run."""

from __future__ import annotations

from shoal_lab.experiments.common.experiment import Result


def result(**changes):
    """Return a result with sound values, some of them changed."""
    made = {
        "experiment": "toy",
        "algorithm": "fedavg",
        "accuracy": 91.5,
        "clusters": 2,
        "rounds": 3,
        "cpu_seconds_per_round": 0.25,
        "published": 90.0,
        "history": [{"round": 1, "accuracy": 50.0, "loss": 1.0, "purity": 0.5}],
        "parameters": {"lr": 0.1},
    }
    return Result(**{**made, **changes})
