"""fedgroup-heterogeneity: Table I's figures, and the split that the paper calls IID."""

import numpy as np
from shoal_lab.experiments.figures import panels_of
from shoal_lab.experiments.studies.run import figures
from shoal_lab.experiments.studies.tasks import identical

from shoal.simulation.data import Population, Shard
from tests.helpers.studies import run


def test_it_reports_table_one(data_sets):
    settings = {"cohort": 5, "epochs": 2}
    data = run("fedgroup-heterogeneity", data_sets, devices=20, rounds=3, settings=settings)
    assert list(data["classes"]) == ["1", "3", "5", "10"] == list(data["published"])
    for found in data["classes"].values():
        assert found.keys() >= data["published"]["1"].keys()
        assert found["median"] <= found["max"]
        assert found["discrepancy_mean"] > 0
    assert [len(p.lines) for p in panels_of([data], "panels")] == [4, 4]
    assert data["populations"]["10"]["groups"] == 1


def test_the_iid_split_mixes_classes():
    def shards(*sizes):
        return tuple(Shard(np.full((n, 1), 10 * i, np.float32), np.full(n, i, np.int64)) for i, n in enumerate(sizes))

    given = Population(shards(40, 4, 30), test=shards(4, 1, 3), groups=(0, 1, 2))
    dealt = identical(given, 3)
    for before, after in ((given.train, dealt.train), (given.test, dealt.test)):
        assert [len(s) for s in before] == [len(s) for s in after]
        labels = np.concatenate([s.y for s in after])
        assert sorted(labels) == sorted(np.concatenate([s.y for s in before]))
        assert np.array_equal(np.concatenate([s.x for s in after])[:, 0], 10 * labels)
    assert len(set(dealt.train[0].y)) == 3
    assert dealt.groups == (0, 0, 0)
    assert np.array_equal(dealt.train[2].y, identical(given, 3).train[2].y)


def test_table_one_figures():
    rows = [
        {"round": 1, "accuracy": 60.0, "discrepancy": 1.0, "discrepancy_after": 0.5},
        {"round": 2, "accuracy": 85.0, "discrepancy": 3.0, "discrepancy_after": 1.5},
        {"round": 3, "accuracy": None},
        {"round": 4, "accuracy": 90.0},
    ]
    found = figures(rows)
    assert (found["max"], found["median"], found["rounds_to_85"]) == (90.0, 85.0, 2)
    assert (found["discrepancy_mean"], found["discrepancy_variance"]) == (1.0, 0.25)
    assert (found["discrepancy_before_mean"], found["discrepancy_before_variance"]) == (2.0, 1.0)
    assert figures(rows[:1])["rounds_to_85"] is None
