"""Federated averaging in Shoal's simulator, for the race."""

import pytest
from shoal_lab.bench.race.systems import shoal_simulator
from shoal_lab.bench.race.systems.shoal_simulator import network
from shoal_lab.bench.race.tasks import TASKS

from tests.lab.bench.race.systems.conftest import ROUNDS

pytestmark = pytest.mark.torch


def test_rounds_of_one_batch_are_gradient_descent_on_all_samples(arguments, expected, seen, monkeypatch):
    monkeypatch.setattr(shoal_simulator, "Turns", lambda: seen)
    shoal_simulator.main()
    assert seen.calls == [*(["begin", "trained"] * ROUNDS), "tested"]
    assert seen.accuracy == pytest.approx(expected, abs=0.011)
    assert seen.accuracy > 0.6


@pytest.mark.parametrize(("name", "length"), [("mlp", 159_010), ("logistic", 7850), ("cnn", 44_426)])
def test_each_task_has_its_network(name, length):
    assert network(TASKS[name]).length == length
