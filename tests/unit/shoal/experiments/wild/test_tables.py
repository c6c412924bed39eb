"""The dealing of tables: shares, groups and scales."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.experiments.wild import tables
from shoal.experiments.wild.scenarios import SCENARIOS

TABLES = [name for name, s in SCENARIOS.items() if not s.needs]


@pytest.mark.parametrize("name", TABLES)
def test_every_device_has_all_shares_in_the_networks_shape(name):
    fleet = tables.deal(SCENARIOS[name], seed=0)
    population = fleet.population
    kind = np.float32 if fleet.network.kind == "regression" else np.int64
    for shards in (population.train, population.validation, population.test):
        assert all(len(s) and s.x.dtype == np.float32 and s.y.dtype == kind for s in shards)
        assert {s.x.shape[1] for s in shards} == {fleet.network.shapes[0][1]}
    assert np.isfinite(population.train[0].x).all()


def test_groups_take_turns_and_differ_in_their_labels():
    first, second = (tables.deal(SCENARIOS["table-wine"], seed=s).population for s in (0, 0))
    assert first.groups == (0, 1, 0, 1, 0, 1)
    assert np.array_equal(first.train[1].y, second.train[1].y)
    assert tables.deal(SCENARIOS["table-iris"], seed=0).population.groups == (0,) * 6


def test_drawn_tables_have_a_large_test_share():
    population = tables.deal(SCENARIOS["table-planes"], seed=3).population
    assert [len(s[0]) for s in (population.train, population.validation, population.test)] == [36, 12, 212]
    assert len(set(population.groups)) == 3
