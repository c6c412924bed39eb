"""Results of experiments that were never run."""

from __future__ import annotations

from shoal_lab.experiments.common.experiment import Options, Study


def result(**changes):
    """Return a result with sound values, some of them changed."""
    made = {
        "accuracy": 91.5,
        "clusters": 2,
        "cpu_seconds_per_round": 0.25,
        "history": [{"round": 1, "accuracy": 50.0, "loss": 1.0, "purity": 0.5}],
    }
    options = Options(algorithm="fedavg", rounds=3)
    return Study("toy", "", "", ("fedavg",), {"fedavg": 90.0}).result(options, {"lr": 0.1}, **{**made, **changes})
