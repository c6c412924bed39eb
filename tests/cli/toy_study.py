"""An experiment that computes nothing, and one whose data are nowhere, for the command line of `shoal simulate`.

``python -m tests.cli.toy_study simulate toy`` runs it.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from shoal_lab.experiments import registry
from shoal_lab.experiments.common.experiment import Study

REMOVE = "SHOAL_TEST_REMOVE"
"""Variable with a folder that the experiment removes before its first round."""

PUBLISHED = {"ifca": 95.25, "fedavg": {"a": 1, "b": 2.5}}


def run(study, options, progress):
    """Report rounds; the setting ``pause_s`` is the time of each."""
    rounds, history = options.rounds or 3, []
    progress.stage("dealing the samples")
    if REMOVE in os.environ:
        Path(os.environ[REMOVE]).rmdir()
    for r in range(1, rounds + 1):
        time.sleep(options.values["pause_s"])
        history.append({"round": r, "accuracy": 50.0 + r, "loss": 1 / r, "purity": 0.5})
        progress.round(options.algorithm, r, rounds, history[-1])
    return study.result(
        options,
        {
            "grid": options.grid,
            "device": options.device,
            "data_dir": options.data_dir,
        },
        accuracy=50.0 + rounds,
        clusters=2,
        rounds=rounds,
        cpu_seconds_per_round=0.01,
        history=history,
        purity=1.0,
        ari=0.5,
        extra={"gap": 0.125, "clusters_seen": [1, 2]},
    )


def run_needy(_study, options, _progress):
    """Read CIFAR-10."""
    from shoal_lab.experiments.data import datasets

    return datasets.load("cifar10", options.data_dir)


def main():
    """Add both experiments and run `shoal`."""
    from shoal.cli import main as shoal

    algorithms = ("ifca", "fedavg")
    methods, values = {name: {"strategy": name} for name in algorithms}, {"pause_s": 0.0}
    toy = Study(
        "toy", "a paper, table 1", "a toy", algorithms, PUBLISHED, run, ["mnist"], methods=methods, values=values
    )
    registry.register(toy)
    registry.register(Study("needy", "", "", ("ifca",), {}, run_needy, needs=("cifar10",)))
    shoal()


if __name__ == "__main__":
    main()
