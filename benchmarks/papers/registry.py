"""Which module holds which experiment; nothing is imported before it is asked for."""

from __future__ import annotations

import importlib
from typing import Final

from benchmarks.papers.experiment import Experiment
from wire.errors import UsageError

_MODULES: Final[dict[str, str]] = {
    "ifca-synthetic": "ifca_synthetic",
    "ifca-rotated-mnist": "ifca_images",
    "ifca-rotated-cifar": "ifca_images",
    "ifca-femnist": "ifca_femnist",
    "cfl-gap-samples": "cfl_gap",
    "cfl-gap-rounds": "cfl_gap",
    "cfl-noise": "cfl_noise",
    "cfl-toys": "cfl_toys",
    "cfl-congruence": "cfl_congruence",
    "cfl-label-permutation": "cfl_labels",
    "cfl-label-swap": "cfl_labels",
    "cfl-news": "cfl_news",
    "fedgroup-heterogeneity": "fedgroup_mnist",
    "fedgroup-mnist-mclr": "fedgroup_mnist",
    "fedgroup-mnist-mlp": "fedgroup_mnist",
    "fedgroup-synthetic": "fedgroup_synthetic",
    "fedgroup-femnist": "fedgroup_leaf",
    "fedgroup-sent140": "fedgroup_leaf",
    "newcomers": "newcomers",
}

_added: dict[str, Experiment] = {}


def ids() -> tuple[str, ...]:
    """Return every experiment's id, in the papers' order."""
    return (*_MODULES, *_added)


def find(name: str) -> Experiment:
    """Return the experiment called ``name``; its module is imported now. A module exposes ``EXPERIMENTS``.

    Raises:
        UsageError: there is none.
    """
    if name in _added:
        return _added[name]
    if name not in _MODULES:
        raise UsageError(f"no experiment {name!r}", hint=f"there are {', '.join(ids())}")
    module = importlib.import_module(f"benchmarks.papers.{_MODULES[name]}")
    experiments: tuple[Experiment, ...] = module.EXPERIMENTS
    return next(e for e in experiments if e.id == name)


def register(experiment: Experiment) -> None:
    """Add an experiment of one's own to those that `ids` and `find` know.

    Raises:
        UsageError: its id is taken.
    """
    if experiment.id in ids():
        raise UsageError(f"there is an experiment {experiment.id!r} already")
    _added[experiment.id] = experiment


def unregister(name: str) -> None:
    """Forget an experiment that `register` added."""
    _added.pop(name, None)
