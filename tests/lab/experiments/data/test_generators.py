"""Synthetic(alpha, beta): linear labels of one model a device, around means that alpha and beta spread."""

from __future__ import annotations

import numpy as np
import pytest
from shoal_lab.experiments.data.splits import synthetic

from shoal.errors import UsageError
from shoal.simulation.shares import statistics


def test_it_has_the_papers_shape():
    population = synthetic(1, 1, seed=0)
    assert len(population) == 100
    assert population.groups is None
    assert {s.x.shape[1] for s in population.train} == {60}
    assert max(int(s.y.max()) for s in population.train) <= 9
    figures = statistics(population)
    assert figures["samples_a_device"]["min"] >= 50
    assert figures["test"] == pytest.approx(0.1 * figures["samples"], rel=0.02)


def test_labels_come_from_one_linear_model():
    """Multinomial regression on its own data fits a device almost perfectly, and its neighbour badly."""
    from sklearn.linear_model import LogisticRegression

    population = synthetic(1, 1, devices=12, seed=3)
    big = sorted(range(12), key=lambda i: -len(population.train[i]))[:2]
    one, other = (population.train[i] for i in big)
    model = LogisticRegression(C=100.0, max_iter=3000).fit(one.x, one.y)
    assert model.score(one.x, one.y) > 0.95
    assert model.score(other.x, other.y) < 0.6


def test_beta_spreads_the_inputs():
    """The devices' mean inputs vary by beta, and by 1 around that."""

    def spread(beta):
        return float(np.std([s.x.mean() for s in synthetic(0, beta, devices=60, seed=1).train]))

    assert spread(5.0) > 3 * spread(0.0)


def test_later_inputs_vary_less():
    """The covariance is diag(j^-1.2): the sixtieth coordinate's deviation is 60^-0.6 of the first's."""
    deviations = np.mean([s.x.std(0) for s in synthetic(1, 1, devices=40, seed=2).train], 0)
    assert deviations[59] / deviations[0] == pytest.approx(60**-0.6, rel=0.15)


def test_the_seed_decides_everything():
    one, again, other = (synthetic(1, 1, devices=5, seed=s) for s in (4, 4, 5))
    assert all(
        np.array_equal(a.x, b.x) and np.array_equal(a.y, b.y) for a, b in zip(one.train, again.train, strict=True)
    )
    assert not np.array_equal(one.train[0].x, other.train[0].x)


def test_nonsense_is_refused():
    with pytest.raises(UsageError, match="can't be made"):
        synthetic(-1, 1, seed=0)
