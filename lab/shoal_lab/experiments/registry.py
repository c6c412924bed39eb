"""The experiments by name. A module is imported only when one of its experiments is requested."""

from __future__ import annotations

import importlib
from typing import Final

from shoal.errors import UsageError
from shoal_lab.experiments.common.experiment import Experiment

_MODULES: Final[dict[str, str]] = {
    "ifca-synthetic": "ifca.synthetic",
    "ifca-rotated-mnist": "ifca.images",
    "ifca-rotated-cifar": "ifca.images",
    "ifca-femnist": "ifca.femnist",
    "cfl-gap-samples": "cfl.gap",
    "cfl-gap-rounds": "cfl.gap",
    "cfl-noise": "cfl.noise",
    "cfl-toys": "cfl.toys",
    "cfl-congruence": "cfl.congruence",
    "cfl-label-permutation": "cfl.labels",
    "cfl-label-swap": "cfl.labels",
    "cfl-news": "cfl.news",
    "fedgroup-heterogeneity": "fedgroup.mnist",
    "fedgroup-mnist-mclr": "fedgroup.mnist",
    "fedgroup-mnist-mlp": "fedgroup.mnist",
    "fedgroup-synthetic": "fedgroup.synthetic",
    "fedgroup-femnist": "fedgroup.leaf",
    "fedgroup-sent140": "fedgroup.leaf",
    "newcomers": "fedgroup.newcomers",
    "wild": "wild.study",
}

_added: dict[str, Experiment] = {}


def ids() -> tuple[str, ...]:
    """Return every experiment's id, in the papers' order."""
    return (*_MODULES, *_added)


def find(name: str) -> Experiment:
    """Return the experiment called ``name``; its module is imported now. A module exposes ``EXPERIMENTS``.

    Raises:
        UsageError: there is no such experiment.
    """
    if name in _added:
        return _added[name]
    if name not in _MODULES:
        raise UsageError(f"no experiment {name!r}", hint=f"there are {', '.join(ids())}")
    module = importlib.import_module(f"shoal_lab.experiments.{_MODULES[name]}")
    experiments: tuple[Experiment, ...] = module.EXPERIMENTS
    return next(e for e in experiments if e.id == name)


def register(experiment: Experiment) -> None:
    """Add an experiment from outside this package to those that `ids` and `find` know.

    Raises:
        UsageError: its id is taken.
    """
    if experiment.id in ids():
        raise UsageError(f"there is an experiment {experiment.id!r} already")
    _added[experiment.id] = experiment
