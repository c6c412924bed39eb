"""What the papers' runs set differently from a fleet's, and that every experiment of a paper sets just that."""

import ast
from pathlib import Path

import pytest
import shoal_lab.experiments
from shoal_lab.experiments.common.paper import PAPER, unlike_a_fleet

from shoal.simulation.engine.fleet import sim_options

pytest.importorskip("torch")

from shoal_lab.experiments.common.paper import paper_options

from shoal.protocol.recipe import DEFAULTS, LocalTraining

FOLDER = Path(shoal_lab.experiments.__file__).parent


LOCAL = LocalTraining()


def test_papers_limit_nothing():
    made = paper_options(rounds=1, local=LOCAL)
    assert (made.recipe.min_contributors, made.recipe.weight_cap, made.norm_screen) == (1, 0.0, False)
    assert made.recipe.norm_limit > DEFAULTS.norm_limit


def test_an_experiment_may_choose_otherwise():
    assert paper_options(rounds=1, local=LOCAL, weight_cap=2.0).recipe.weight_cap == 2.0


def test_each_option_is_not_a_fleets():
    assert paper_options() == sim_options(**PAPER)
    assert all(getattr(DEFAULTS, name, True) != value for name, value in PAPER.items())


@pytest.mark.parametrize(
    ("parameters", "more"),
    [
        ({}, ", no mask"),
        ({"mask": "none", "weighting": "samples"}, ", no mask"),
        ({"mask": "rotation", "weighting": "uniform"}, ", weighting uniform"),
        ({"mask": "permutation"}, ", mask permutation"),
        ({"mask": "nothing leaves a device"}, ", no mask"),
    ],
)
def test_a_row_says_what_it_sets_differently(parameters, more):
    shown = unlike_a_fleet(parameters)
    assert shown == f"min_contributors 1, no weight cap, no norm limits, robust off{more}"


def test_options_come_from_two_functions():
    """`paper_options` for papers and `fleet_options` for the others: no third set of defaults."""
    found = [
        file.name
        for file in FOLDER.rglob("*.py")
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "sim_options"
    ]
    assert found == ["paper.py"]
