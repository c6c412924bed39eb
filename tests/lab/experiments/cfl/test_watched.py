"""A watched run of CFL or of its baseline: the options it runs with, and the result that its records give."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shoal_lab.experiments.cfl import watched as module
from shoal_lab.experiments.cfl.watch import CflWatch
from shoal_lab.experiments.cfl.watched import watched, watched_result
from shoal_lab.experiments.common.experiment import Options

from shoal.simulation.data import Population, Shard
from shoal.simulation.trainers.networks import Softmax
from shoal.task.manifest import LocalTraining

LOCAL = LocalTraining(epochs=1, batch_size=5, lr=0.1)


def population(groups: tuple[int, ...] | None = (0, 1)) -> Population:
    rng = np.random.default_rng(0)
    shards = tuple(Shard(rng.random((6, 2), np.float32), rng.integers(0, 2, 6)) for _ in range(2))
    return Population(shards, test=shards, groups=groups)


class Told:
    """Records the progress of a run."""

    def __init__(self) -> None:
        self.stages: list[str] = []
        self.rounds: list[tuple[Any, ...]] = []

    def stage(self, text: str) -> None:
        self.stages.append(text)

    def round(self, *given: Any) -> None:
        self.rounds.append(given)


def test_every_round_is_recorded_and_reported() -> None:
    """The first record is reported with the second round: progress comes before the watch."""
    progress = Told()
    watch, done = watched("fedavg", {}, population(), Softmax(2, 2), LOCAL, 3, 2, Options(), progress)
    assert progress.stages == ["fedavg: 2 devices, 3 rounds, 6 coordinates"]
    assert [given[:3] for given in progress.rounds] == [("fedavg", r, 3) for r in (1, 2, 3)]
    assert [given[3] for given in progress.rounds] == [None, watch.rows[0], watch.rows[1]]
    assert [row["round"] for row in watch.rows] == [1, 2, 3]
    assert [row["accuracy"] is None for row in watch.rows] == [False, True, False]
    assert done.all_rounds == 3


def test_devices_without_true_groups_are_one_group() -> None:
    """Their single cluster is the true partition."""
    watch, _ = watched("fedavg", {}, population(None), Softmax(2, 2), LOCAL, 1, 1, Options(), Told())
    assert watch.groups == (0, 0)
    assert watch.rows[0]["ari"] == 1.0


def test_a_run_counts_every_round_and_has_neither_cap_nor_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the papers; single updates are stored, for the watch measures them."""
    seen: dict[str, Any] = {}

    def simulate(algorithm: str, settings: Any, *rest: Any, **more: Any) -> None:
        seen.update(algorithm=algorithm, settings=settings, options=rest[2])

    monkeypatch.setattr(module, "simulate", simulate)
    options = Options(seed=5, mask="rotation", settings={"trainer": "loop"})
    watched("cfl", {"eps1": "0.4"}, population(), Softmax(2, 2), LOCAL, 9, 1, options, Told())
    given = seen["options"]
    assert (seen["algorithm"], seen["settings"]) == ("cfl", {"eps1": "0.4"})
    assert (given.rounds, given.local, given.seed, given.mask, given.trainer) == (9, LOCAL, 5, "rotation", "loop")
    assert (given.count, given.deferred, given.weight_cap, given.norm_screen) == ("all", False, 0.0, False)


def recorded() -> CflWatch:
    watch = CflWatch((0, 0))
    watch.rows = [
        {"round": 1, "clusters": 1, "purity": 0.5, "ari": 0.0},
        {"round": 2, "clusters": 2, "purity": 1.0, "ari": 0.9},
    ]
    return watch


def done(accuracy: float | None = 80.0) -> Any:
    final = None if accuracy is None else SimpleNamespace(accuracy=accuracy)
    return SimpleNamespace(final=final, cpu_seconds_per_round=0.5)


def test_the_result_is_of_the_last_record() -> None:
    data = watched_result("x", "cfl", 90.0, recorded(), done(), {"lr": 0.1}, {"perplexity": 3.0}).data()
    assert (data["experiment"], data["algorithm"], data["published"]) == ("x", "cfl", 90.0)
    assert (data["clusters"], data["purity"], data["ari"], data["rounds"]) == (2, 1.0, 0.9, 2)
    assert (data["accuracy"], data["cpu_seconds_per_round"], data["perplexity"]) == (80.0, 0.5, 3.0)
    assert [row["round"] for row in data["history"]] == [1, 2]
    assert data["true_partition"] is False


def test_the_baseline_has_no_report_of_splits_and_an_untested_run_no_accuracy() -> None:
    data = watched_result("x", "fedavg", None, recorded(), done(None), {}).data()
    assert data["accuracy"] is None
    assert "splits" not in data
    assert "true_partition" not in data
