"""The experiment on the command line's side: its scenarios and algorithms."""

from __future__ import annotations

from shoal_lab.experiments.wild import study
from shoal_lab.experiments.wild.scenarios import SCENARIOS


def test_scenarios_are_described():
    about = study.described()
    assert list(about) == list(SCENARIOS)
    assert about["swapped-4-fashion"]["needs"] == ["fashion-mnist"]
    assert about["table-wine"] | {"title": ""} == {
        "title": "",
        "kind": "tables, classification and regression",
        "data": "wine",
        "network": "linear",
        "needs": [],
    }


def test_the_default_strategy_is_cfl():
    (experiment,) = study.EXPERIMENTS
    assert experiment.algorithms[0] == "cfl"
    assert {"fedavg", "local", "true-groups"} <= set(experiment.algorithms)
