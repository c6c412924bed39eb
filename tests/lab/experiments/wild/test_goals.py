"""Goals for single fleets: figures read from runs, means over seeds and goals for each seed, and their table."""

from __future__ import annotations

import pytest
from shoal_lab.experiments.wild import page as goals
from shoal_lab.experiments.wild.page import COLUMNS, GOALS, Goal
from shoal_lab.experiments.wild.scenarios import SCENARIOS

RUN = {
    "mean": 79.5,
    "personal_mean": 84.0,
    "personal_worst": 70.0,
    "ari": 0.5,
    "history": [{"round": 40, "accuracy": 81.0}, {"round": 50, "accuracy": 83.0}, {"round": 60, "accuracy": 84.0}],
}


@pytest.mark.parametrize(
    ("read", "figure"),
    [
        ("mean", 79.5),
        ("half", 83.0),
        ("personal_mean", 84.0),
        ("personal_worst", 70.0),
        ("ari", 0.5),
    ],
)
def test_figures_are_read_from_a_run(read, figure):
    assert goals.figure(RUN, read) == figure


def test_an_unmeasured_round_is_an_error():
    with pytest.raises(KeyError, match="no accuracy after round 50"):
        goals.figure({"history": []}, "half")


@pytest.mark.parametrize(
    ("every", "figures", "reached"),
    [(False, (79, 81), True), (True, (79, 81), False), (True, (80, 81), True), (False, (), False)],
)
def test_a_goal_is_for_mean_or_each_seed(every, figures, reached):
    goal = Goal("alike", "cfl", "the models", "mean", 80.0, every=every)
    assert goal.reached([{"mean": one} for one in figures]) is reached


def test_goals_are_for_known_fleets():
    assert {g.scenario for g in GOALS} <= SCENARIOS.keys()
    assert {g.strategy for g in GOALS} <= COLUMNS.keys()


def test_the_table_says_what_is_reached():
    found = goals.goals_table({"alike-dirichlet-0.1": {"cfl": [RUN, {"personal_mean": 96.0}]}}, COLUMNS).splitlines()
    single = found[2 : 2 + len(GOALS)]
    assert single[-1] == "| `alike-dirichlet-0.1` | CFL | with the finish | 94.0 | 90.0; 84.0 96.0 | no |"
    assert single[0].endswith("| 82.0 | - | - |")
    assert found[-1] == "| `alike` | FedGroup | right number of groups | 5 of 5 | - | - |"


@pytest.mark.parametrize(
    ("clusters", "end"),
    [((1, 1, 1, 1, 1), "5 of 5 | yes |"), ((1, 2, 1, 1, 1), "4 of 5 | no |"), ((1, 1), "2 of 2 | - |")],
)
def test_groups_are_counted_over_all_seeds(clusters, end):
    runs = [{"clusters": n, "parameters": {"groups": 1}} for n in clusters]
    assert goals.goals_table({"alike": {"ifca": runs}}, COLUMNS).splitlines()[-3].endswith(f"| 5 of 5 | {end}")
