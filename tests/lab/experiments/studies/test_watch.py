"""Records of splits: right or wrong, accuracy before and after, and the round from which the clusters are the groups."""

from __future__ import annotations

import numpy as np
import pytest
from shoal_lab.experiments.studies.watch import CflWatch, cluster_gaps

from aggregator.strategies.base import ClientUpdate, Event
from shoal.protocol.messages import Phase
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine.fleet import sim_options
from shoal.simulation.engine.simulate import Observation, simulate
from shoal.simulation.trainers.networks import Softmax


def upload(device: str, vector: list[float], model: int = 0, phase: Phase = Phase.TRAIN) -> ClientUpdate:
    row = np.array(vector, np.float32)
    return ClientUpdate(
        round=1,
        phase=phase,
        device=device,
        model=model,
        samples=10,
        loss=0.5,
        key_id=bytes(16),
        vector=row,
        norm=float(np.linalg.norm(row)),
    )


def test_gaps_are_taken_cluster_by_cluster() -> None:
    """Two groups at right angles in one cluster have a gap of 1; a cluster on trial or of one device has none."""
    group_of = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 0, "f": 0, "g": 0}
    given = [
        upload("a", [1, 0, 0]),
        upload("b", [2, 0, 0]),
        upload("c", [0, 1, 0]),
        upload("d", [0, 3, 0]),
        upload("e", [1, 1, 1], model=2),
        upload("f", [1, 0, 0], model=3, phase=Phase.TRIAL),
        upload("g", [0, 0, 1], model=3, phase=Phase.TRIAL),
    ]
    assert cluster_gaps(given, group_of) == {"0": pytest.approx(1.0)}


def test_a_waiting_device_is_in_no_cluster() -> None:
    """With few drawn, some have no fresh update when their cluster is cut; all others are looked at as ever."""
    rng = np.random.default_rng(3)
    shares: list[list[Shard]] = [[], [], []]
    for device in range(8):
        for share, n in zip(shares, (20, 6, 6), strict=True):
            x = rng.normal(size=(n, 4)).astype(np.float32)
            share.append(Shard(x, ((x[:, 0] > 0) ^ (device % 2 == 1)).astype(np.int64)))
    groups = tuple(d % 2 for d in range(8))
    population = Population(*map(tuple, shares), groups=groups)
    watch, unplaced = CflWatch(groups), 0

    def look(seen: Observation) -> None:
        nonlocal unplaced
        unplaced += len(seen.state.unplaced)
        watch(seen)

    settings = {"validate": "off", "eps1": "0.9", "cool_down": "1", "max_age": "1"}
    local = LocalTraining(epochs=2, batch_size=5, lr=0.3)
    options = sim_options(rounds=8, local=local, seed=5, participation=0.5, min_contributors=1)
    simulate("cfl", settings, population, Softmax(4, 2), options, watch=look)
    assert unplaced
    assert len(watch.rows) == 8
    assert watch.report()["splits"]


def watch_with(aris: list[float]) -> CflWatch:
    watch = CflWatch((0, 0, 1, 1))
    watch.rows = [{"round": i + 1, "ari": ari} for i, ari in enumerate(aris)]
    return watch


@pytest.mark.parametrize(
    ("aris", "expected"),
    [([0.0, 0.0, 1.0, 1.0], 3), ([0.0, 1.0, 0.4, 1.0], 4), ([0.0, 1.0, 0.4], None), ([1.0, 1.0], 1), ([0.0], None)],
)
def test_a_partition_counts_once_it_stays(aris: list[float], expected: int | None) -> None:
    """A partition that is lost again has not been reached."""
    assert watch_with(aris).partition_round() == expected
    report = watch_with(aris).report()
    assert report["true_partition"] == (expected is not None)
    assert report["rounds_after_partition"] == (None if expected is None else len(aris) - expected)


def test_splits_are_judged() -> None:
    """A split is right, wrong, or of a cluster that was pure; accuracy is of its own devices alone."""
    watch = CflWatch((0, 0, 1, 1))
    group_of = {"a": 0, "b": 0, "c": 1, "d": 1}
    watch._seen = [
        (1, {"a": 0.2, "b": 0.4, "c": 0.1, "d": 0.1}),
        (5, {"a": 0.5, "b": 0.7, "c": 0.9, "d": 0.9}),
        (15, {"a": 0.8, "b": 1.0, "c": 0.9, "d": 0.9}),
    ]
    watch._note(Event(2, "trial-opened", {"cluster": 0}), group_of, {0: list("abcd")})
    watch._note(
        Event(5, "split", {"cluster": 0, "children": [1, 2], "sizes": [2, 2]}), group_of, {1: ["a", "b"], 2: ["c", "d"]}
    )
    watch._note(Event(5, "split", {"cluster": 1, "children": [3, 4], "sizes": [1, 1]}), group_of, {3: ["a"], 4: ["b"]})
    watch._note(
        Event(5, "split", {"cluster": 2, "children": [5, 6], "sizes": [2, 2]}), group_of, {5: ["a", "c"], 6: ["b", "d"]}
    )
    moved = {"from": 5, "cluster": 6, "device": "a"}
    watch._note(Event(5, "moved", moved), group_of, {5: ["b", "c"], 6: ["a", "d"]})
    watch._note(Event(5, "moved", {**moved, "device": "c"}), group_of, {5: ["a", "b"], 6: ["c", "d"]})
    watch._note(Event(6, "split-refused", {"cluster": 7, "sizes": [1, 1]}), group_of, {7: ["a", "c"]})
    right, pure, wrong = watch.split_report()
    assert right["right"]
    assert not right["of_pure_cluster"]
    assert pure["of_pure_cluster"]
    assert not pure["right"]
    assert not wrong["right"]
    assert not wrong["of_pure_cluster"]
    before, after, later = (right[f"accuracy_{name}"] for name in ("before", "after", "later"))
    assert before == pytest.approx(20.0)
    assert after == pytest.approx(75.0)
    assert later == pytest.approx(90.0)
    assert pure["accuracy_after"] == pytest.approx(60.0)
    watch.rows = [{"round": 20, "ari": 0.0}]
    report = watch.report()
    assert (report["pure_clusters_split"], report["wrong_splits"]) == (1, 1)
    assert (report["trials_refused"], report["trials_refused_of_impure_clusters"]) == (1, 1)
    assert [(m["device"], m["right"]) for m in report["moves"]] == [("a", False), ("c", True)]
    assert (report["devices_moved"], report["wrong_moves"]) == (2, 1)
    assert report["split_log"][0] == "round 5: 2 + 2 devices (right), 20.0 % before, 75.0 % after, 90.0 % later"
