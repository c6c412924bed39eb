"""Federated averaging in plain torch."""

import pytest
from shoal_lab.bench.race.systems import plain

from tests.lab.bench.race.systems.conftest import ROUNDS

pytestmark = pytest.mark.torch


def test_rounds_of_one_batch_are_gradient_descent_on_all_samples(arguments, expected, seen, monkeypatch):
    monkeypatch.setattr(plain, "Turns", lambda: seen)
    plain.main()
    assert seen.calls == [*(["begin", "trained"] * ROUNDS), "tested"]
    assert seen.accuracy == pytest.approx(expected, abs=0.011)
    assert seen.accuracy > 0.6
