"""The experiments by name."""

from __future__ import annotations

import pytest
from shoal_lab.experiments import registry
from shoal_lab.experiments.common.experiment import Options, Quiet, Study
from shoal_lab.experiments.data import datasets

from shoal.errors import UsageError
from tests.helpers.results import result


@pytest.fixture
def toy(monkeypatch):
    """A registered experiment, forgotten afterwards."""
    monkeypatch.setattr(registry, "_added", {})
    study = Study("toy", "none", "a toy", ("fedavg",), {}, lambda _o, _p: result())
    registry.register(study)
    return study


def test_a_registered_experiment_is_found_and_runs(toy):
    assert registry.find("toy") is toy
    assert registry.ids()[-1] == "toy"
    assert toy.run(Options(), Quiet()).accuracy == 91.5


def test_an_id_is_taken_once(toy):
    for study in (toy, Study("ifca-synthetic", "", "", (), {}, toy.runner)):
        with pytest.raises(UsageError, match="already"):
            registry.register(study)


def test_an_unknown_experiment_is_refused_with_those_that_there_are():
    with pytest.raises(UsageError, match="no experiment 'toy'") as caught:
        registry.find("toy")
    assert "ifca-rotated-mnist" in caught.value.hint


def test_every_table_and_figure_has_its_id():
    """Eighteen tables and figures of the papers, the placement of newcomers, and wild fleets."""
    assert len(registry.ids()) == len(set(registry.ids())) == 20


@pytest.mark.parametrize("name", registry.ids())
def test_an_experiments_module_has_it(name):
    """And knows all of its data sets."""
    found = registry.find(name)
    assert found.id == name
    assert found.algorithms
    assert set(found.needs) <= set(datasets.names())


def test_modules_are_imported_only_for_the_experiment_that_is_asked_for(monkeypatch):
    """A list of names must not pay for torch."""
    monkeypatch.setattr(registry.importlib, "import_module", lambda name: pytest.fail(f"{name} was imported"))
    assert "cfl-news" in registry.ids()
    with pytest.raises(UsageError, match="no experiment 'x'"):
        registry.find("x")
