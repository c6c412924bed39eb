"""One set of defaults: the owner's command, a run's options, the simulator, and `shoal.simulate` take them from one place."""

import dataclasses
import inspect

import pytest

pytest.importorskip("torch")

import shoal
from shoal.owner.cli.runs import start
from shoal.owner.runs import defaults
from shoal.owner.runs.plan import RunOptions
from shoal.simulation.engine.fleet import fleet_options, fleet_run
from shoal.simulation.engine.records import SimOptions
from shoal.task.manifest import LocalTraining

NAMED = {
    name.removeprefix("DEFAULT_").lower(): getattr(defaults, name)
    for name in dir(defaults)
    if name.startswith("DEFAULT_") and name != "DEFAULT_ALGORITHM"
}
"""All but the algorithm, which a run's options have no default of, and the owner's command takes when none is given."""
SIMULATED = {"participation", "weighting", "weight_cap", "norm_limit", "min_contributors"}
"""Defaults of a fleet's run that a simulated run has as well."""


def of(options):
    return {f.name: f.default for f in dataclasses.fields(options) if f.default is not dataclasses.MISSING}


def test_they_are_those_that_the_documents_name():
    assert NAMED["min_contributors"] == 3
    assert (NAMED["mode"], NAMED["weighting"], NAMED["weight_cap"]) == ("rotation", "samples", 3.0)


def test_a_runs_options_have_all_of_them():
    assert NAMED.items() <= of(RunOptions).items()


def test_the_owners_command_has_all_of_them():
    given = {name: parameter.default for name, parameter in inspect.signature(start).parameters.items()}
    assert NAMED.items() <= given.items()


def test_every_number_that_a_run_may_have_is_among_them():
    """A new option of a run with a default of its own must be named in `defaults`."""
    own = {name for name, value in of(RunOptions).items() if value is not None}
    assert own == NAMED.keys()


def test_a_simulated_run_has_those_that_it_knows():
    simulated = of(SimOptions)
    assert {name: simulated[name] for name in SIMULATED} == {name: NAMED[name] for name in SIMULATED}
    assert simulated["norm_screen"] is True


def test_the_options_of_a_simulated_fleet_are_the_same():
    made = fleet_options(fleet_run("cfl", {}), rounds=1, local=LocalTraining(), seed=0)
    assert {name: getattr(made, name) for name in SIMULATED} == {name: NAMED[name] for name in SIMULATED}
    assert made.mask == NAMED["mode"]


def test_the_function_for_researchers_has_the_share_of_devices_and_no_other_limits():
    given = {name: parameter.default for name, parameter in inspect.signature(shoal.simulate).parameters.items()}
    assert given["participation"] == NAMED["participation"]
    assert given["robust"] == NAMED["robust"]
    assert given["precision"] == NAMED["precision_up"]
    assert given["precision_down"] == NAMED["precision_down"]
    assert given["min_contributors"] == NAMED["min_contributors"]
    assert not given.keys() & (
        NAMED.keys() - {"participation", "robust", "rounds", "precision_down", "min_contributors"}
    )
