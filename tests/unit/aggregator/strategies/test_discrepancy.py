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


@pytest.mark.parametrize(
    ("given", "after", "figures"),
    [
        ([contribution("a", norm=1.0), contribution("b", norm=3.0)], ClusterModel(), [{"mean": 2.0, "variance": 1.0}]),
        ([contribution("a", X)], None, [{"mean": 1.0, "variance": 0.0}]),
        ([], ClusterModel(), []),
    ],
    ids=["single updates are not kept", "without the model after the round", "no updates"],
)
def test_figures_of_less(given, after, figures):
    found = discrepancy(given, {0: ClusterModel()}, after and {0: after}, 1)
    assert [event.detail for event in found] == figures


def test_fedavg_tells_it_when_asked():
    for switch, count in (("on", 1), ("off", 0)):
        rounds = Rounds(run_plan("fedavg", {"discrepancy": switch}), ("a", "b"))
        rounds.step(lambda d, _o, r: contribution(d, X if d == "a" else Y, round=r))
        assert len(rounds.events) == count
