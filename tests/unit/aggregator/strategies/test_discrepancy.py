"""Eq. 4 on numbers that can be checked by hand."""

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel
from aggregator.strategies.discrepancy import discrepancy
from tests.helpers.plans import Rounds, contribution, run_plan

X, Y = np.eye(6, dtype=np.float32)[:2]


def test_measured_against_their_own_model():
    """Devices are measured against their own model before and after."""
    before = {0: ClusterModel(0, X, 2, 1), 1: ClusterModel()}
    after = {0: ClusterModel(0, X + 2 * Y, 2, 2), 1: ClusterModel(0, 4 * X, 1, 2)}
    given = [contribution("a", Y * 1, model=0), contribution("b", Y * 3, model=0), contribution("c", X * 4, model=1)]
    (event,) = discrepancy(given, before, after, 2)
    assert event.detail == pytest.approx(
        {"mean": 8 / 3, "variance": 14 / 9, "mean_after": 2 / 3, "variance_after": 2 / 9}
    )


def test_norms_suffice_without_updates():
    """Norms are enough where single updates are not kept."""
    given = [contribution("a", norm=1.0), contribution("b", norm=3.0)]
    (event,) = discrepancy(given, {0: ClusterModel()}, {0: ClusterModel()}, 1)
    assert event.detail == {"mean": 2.0, "variance": 1.0}


def test_only_the_first_figures_are_given():
    """Without the models after the round only the first figures are given."""
    (event,) = discrepancy([contribution("a", X)], {0: ClusterModel()}, None, 1)
    assert event.detail == {"mean": 1.0, "variance": 0.0}


def test_round_without_updates_says_nothing():
    assert discrepancy([], {0: ClusterModel()}, {0: ClusterModel()}, 1) == ()


def test_fedavg_tells_it_when_asked():
    for switch, count in (("on", 1), ("off", 0)):
        rounds = Rounds(run_plan("fedavg", {"discrepancy": switch}), ("a", "b"))
        rounds.step(lambda d, _o, r: contribution(d, X if d == "a" else Y, round=r))
        assert len(rounds.events) == count
