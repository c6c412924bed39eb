"""A round of statistics before a strategy's rounds, whose model every later round offers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel, RoundPlan
from aggregator.strategies.fedavg import FedAvgState
from aggregator.strategies.registry import make_strategy, models_needed, plan_settings
from aggregator.strategies.statistics import STATISTICS_ASSIGNMENT, Standardised
from shoal.errors import ConfigError
from shoal.protocol.documents import STATISTICS_SETTING
from shoal.protocol.messages import STATISTICS_MODEL, Phase
from shoal.util.state_codec import decode_state, encode_state
from tests.helpers.plans import D, contribution, run_plan

DEVICES = ("dev-1", "dev-2", "dev-3")
PLAN = run_plan("ifca", {"k": 2, STATISTICS_SETTING: "on"}, origins=3, min_contributors=2)


def fedavg(**changes):
    return make_strategy(run_plan(settings={STATISTICS_SETTING: "on"}, origins=2, **changes))


def given(device, value, round_=1):
    made = contribution(device, np.full(D, value, np.float32), round=round_)
    return dataclasses.replace(made, phase=Phase.STATISTICS, model=STATISTICS_MODEL)


def after_statistics(strategy, devices=DEVICES):
    """Return the state after a round of statistics of these devices, at states that devices hold."""
    state, plan = strategy.plan(strategy.init(DEVICES), 1, DEVICES)
    return strategy.close(state, plan, [given(device, i) for i, device in enumerate(devices)])


def test_the_wrapped_strategy_sees_its_own_plan_alone():
    strategy = make_strategy(PLAN)
    assert isinstance(strategy, Standardised)
    assert (strategy.inner.run.origins, strategy.inner.run.max_models) == (2, PLAN.max_models - 1)
    assert strategy.inner.run.recipe.settings == PLAN.without_statistics.recipe.settings
    assert plan_settings(PLAN).k == 2
    assert models_needed(PLAN) == models_needed(PLAN.without_statistics) + 1
    assert PLAN.without_statistics.without_statistics == PLAN.without_statistics


def test_all_available_devices_report_first_from_the_zero_origin():
    strategy = fedavg(participation=0.1)
    _, plan = strategy.plan(strategy.init(DEVICES), 1, DEVICES)
    assert plan.assignments == dict.fromkeys(DEVICES, STATISTICS_ASSIGNMENT)
    assert plan.models == {STATISTICS_MODEL: ClusterModel(1)}
    assert not plan.trains


def test_their_mean_is_the_model_and_the_strategy_begins():
    strategy = fedavg()
    state, outcome = after_statistics(strategy)
    np.testing.assert_allclose(state.slot.offset, 1.0)
    assert (outcome.clusters, outcome.events[0].kind, outcome.events[0].detail) == ({}, "statistics", {"devices": 3})
    settled = dataclasses.replace(state, slot=ClusterModel(7, version=1))
    after, plan = strategy.plan(settled, 2, DEVICES)
    assert {d: o.phase for d, o in plan.assignments.items()} == dict.fromkeys(DEVICES, Phase.TRAIN)
    assert plan.models == {0: ClusterModel(), STATISTICS_MODEL: ClusterModel(7, version=1)}
    after, outcome = strategy.close(after, plan, [contribution("dev-1", np.ones(D, np.float32), round=2)])
    np.testing.assert_allclose(after.inner.slot.offset, 1.0)
    assert outcome.clusters == dict.fromkeys(DEVICES, 0)
    assert set(strategy.models_of(after)) == {0, STATISTICS_MODEL}
    assert set(strategy.final(after, 9, DEVICES).models) == {0, STATISTICS_MODEL}


def test_too_few_statistics_are_asked_for_again():
    strategy = fedavg(min_contributors=3)
    state, _ = after_statistics(strategy, DEVICES[:2])
    assert state.slot == ClusterModel(1)
    assert strategy.plan(state, 2, DEVICES)[1].assignments["dev-3"].phase is Phase.STATISTICS


def test_states_are_stored_and_devices_leave():
    strategy = fedavg()
    state = strategy.retain(strategy.init(DEVICES), frozenset(DEVICES[:2]))
    assert state.inner == FedAvgState(DEVICES[:2])
    encoded = encode_state(state)
    assert decode_state(strategy.state_type, encoded.document, encoded.arrays) == state


def test_the_other_plan_of_a_strategy_offers_the_statistics_too(monkeypatch):
    strategy = fedavg()
    state = dataclasses.replace(strategy.init(DEVICES), slot=ClusterModel(7, version=1))
    second = RoundPlan(2, {5: ClusterModel()}, {})
    both = (state.inner, RoundPlan(2, {0: ClusterModel()}, {}, otherwise=(state.inner, second)))
    monkeypatch.setattr(strategy.inner, "plan", lambda *_: both)
    other = strategy.plan(state, 2, DEVICES)[1].otherwise
    assert set(other[1].models) == {5, STATISTICS_MODEL}
    assert other[0] == state


def test_a_strategy_that_has_used_up_its_models_is_refused(monkeypatch):
    strategy = fedavg()
    state = dataclasses.replace(strategy.init(DEVICES), slot=ClusterModel(7, version=1))
    full = RoundPlan(2, {STATISTICS_MODEL: ClusterModel()}, {})
    monkeypatch.setattr(strategy.inner, "plan", lambda *_: (state.inner, full))
    with pytest.raises(ConfigError, match="has used up its models") as caught:
        strategy.plan(state, 2, DEVICES)
    assert "locally" in caught.value.hint
