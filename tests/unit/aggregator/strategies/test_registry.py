"""Strategies by name, and the mask modes that each works in."""

import pytest

from aggregator.strategies.base import ORTHOGONAL_MODES
from aggregator.strategies.fedavg import FedAvg
from aggregator.strategies.registry import STRATEGIES, build_strategy, find_strategy, make_strategy
from crypto.mask.modes.registry import MODES
from shoal.errors import ConfigError
from tests.helpers.plans import run_plan


def test_the_papers_strategies_work_in_every_mask_mode():
    """They look at dot products, norms and means alone, which every mode keeps."""
    assert frozenset(MODES) == ORTHOGONAL_MODES
    assert {s.modes for s in STRATEGIES.values()} == {ORTHOGONAL_MODES}


class Sorted(FedAvg):
    """Works in a permutation alone."""

    name = "sorted"
    modes = frozenset({"none", "permutation"})


def test_a_mode_that_a_strategy_does_not_declare_is_refused(monkeypatch):
    """By class and by name: the owner, the aggregator and the simulator all build strategies here."""
    assert build_strategy(Sorted, run_plan(mode="permutation")).name == "sorted"
    for build in (lambda run: build_strategy(Sorted, run), make_strategy):
        monkeypatch.setitem(STRATEGIES, "fedavg", Sorted)
        with pytest.raises(ConfigError, match="sorted does not work in mask mode rotation") as caught:
            build(run_plan(mode="rotation"))
        assert caught.value.hint == "it works in: none, permutation"


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="no algorithm 'fedagv'") as caught:
        find_strategy("fedagv")
    assert "fedavg" in caught.value.hint
