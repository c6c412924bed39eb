"""The dealing of tables: shares, groups and scales."""

from __future__ import annotations

import numpy as np
import pytest
from shoal_lab.experiments.wild import tables
from shoal_lab.experiments.wild.scenarios import SCENARIOS

TABLES = [name for name, s in SCENARIOS.items() if not s.needs]


@pytest.mark.parametrize("name", TABLES)
def test_devices_have_all_shares(name):
    fleet = tables.deal(SCENARIOS[name], seed=0)
    population = fleet.population
    kind = np.float32 if fleet.network.kind == "regression" else np.int64
    for shards in (population.train, population.validation, population.test):
        assert all(len(s) and s.x.dtype == np.float32 and s.y.dtype == kind for s in shards)
        assert {s.x.shape[1] for s in shards} == {fleet.network.shapes[0][1]}
    assert np.isfinite(population.train[0].x).all()


def test_groups_take_turns():
    first, second = (tables.deal(SCENARIOS["table-wine"], seed=s).population for s in (0, 0))
    assert first.groups == (0, 1, 0, 1, 0, 1)
    assert np.array_equal(first.train[1].y, second.train[1].y)
    assert tables.deal(SCENARIOS["table-iris"], seed=0).population.groups == (0,) * 6


def test_drawn_tables_have_large_tests():
    population = tables.deal(SCENARIOS["table-planes"], seed=3).population
    assert [len(s[0]) for s in (population.train, population.validation, population.test)] == [36, 12, 212]
    assert len(set(population.groups)) == 3


def test_given_groups_decide_the_devices():
    three, four = (tables.deal(SCENARIOS[name], seed=0).population for name in ("few-3-2", "few-4-1"))
    assert (three.groups, four.groups) == ((0, 0, 0, 1, 1), (0, 0, 0, 0, 1))
    assert np.array_equal(four.train[3].y, (three.train[3].y - 1) % 10)
    assert len(tables.deal(SCENARIOS["few-3-3-regression"], seed=0).population) == 6


def test_groups_may_differ_in_scale_alone():
    dealt = tables.deal(SCENARIOS["scaled-groups"], seed=0)
    fleet = dealt.population
    spread = np.array([shard.x.std(0) for shard in fleet.test])
    same = np.array(fleet.groups)[:, None] == np.array(fleet.groups)
    apart = np.abs(np.log(spread[:, None] / spread)).mean(2)
    assert apart[same].max() < 0.2
    assert apart[~same].min() > 0.8
    assert dealt.declared is not None, "devices standardise by statistics"


def test_a_series_remembers():
    fleet = tables.deal(SCENARIOS["series"], seed=0)
    population = fleet.population
    whole = np.concatenate([share[0].x for share in (population.train, population.validation, population.test)])
    after_one = [np.corrcoef(whole[1:, i], whole[:-1, i])[0, 1] for i in range(whole.shape[1])]
    assert np.mean(after_one) > 0.7
    assert [len(s[0]) for s in (population.train, population.validation, population.test)] == [36, 12, 212]
