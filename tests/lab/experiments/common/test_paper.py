"""What the papers' runs set differently from a fleet's, and that every experiment of a paper sets just that."""

import pytest

pytest.importorskip("torch")

from shoal_lab.experiments.common.paper import paper_options

from shoal.protocol.recipe import DEFAULTS, LocalTraining

LOCAL = LocalTraining()


def test_papers_limit_nothing():
    made = paper_options(rounds=1, local=LOCAL)
    assert (made.recipe.min_contributors, made.recipe.weight_cap, made.norm_screen) == (1, 0.0, False)
    assert made.recipe.norm_limit > DEFAULTS.norm_limit


def test_an_experiment_may_choose_otherwise():
    assert paper_options(rounds=1, local=LOCAL, weight_cap=2.0).recipe.weight_cap == 2.0
