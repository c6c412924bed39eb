"""A fleet's defaults as options of a simulated run."""

from __future__ import annotations

import dataclasses

import pytest

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.engine.fleet import fleet_options, fleet_run


@pytest.mark.parametrize(("algorithm", "least"), [("cfl", 3), ("local", 1)])
def test_defaults_are_the_fleets(algorithm, least):
    """Weights limits and the smallest mean are the fleets."""
    fleet = fleet_run(algorithm, {})
    made = fleet_options(fleet, rounds=4, local=LocalTraining(), seed=7, participation=0.5)
    assert fleet.min_contributors == least
    assert made.recipe == dataclasses.replace(fleet, rounds=4, local=LocalTraining(), seed=7, participation=0.5)
    assert (made.count, made.norm_screen) == ("all", True)


def test_other_options_override_the_fleets():
    made = fleet_options(fleet_run("cfl", {}), rounds=1, local=LocalTraining(), seed=0, mode="none", evaluate_every=5)
    assert (made.recipe.mode, made.evaluate_every) == ("none", 5)


def test_owners_choices_override_defaults():
    """An owners other choices override the defaults."""
    assert fleet_run("cfl", {"margin": "0"}, min_contributors=5).min_contributors == 5
    assert fleet_run("local", {}, min_contributors=5).min_contributors == 1
