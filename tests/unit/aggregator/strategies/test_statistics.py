"""A round of statistics before a strategy's rounds, whose model every later round offers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aggregator.rounds.relay import States, settle
from aggregator.strategies.base import ClusterModel, RoundPlan
from aggregator.strategies.fedavg import FedAvgState
from aggregator.strategies.registry import make_strategy, models_needed, plan_settings
from aggregator.strategies.statistics import STATISTICS_ASSIGNMENT, Standardised
from shoal.errors import ConfigError
from shoal.protocol.documents import STATISTICS_SETTING
from shoal.protocol.messages import STATISTICS_MODEL, Phase, statistics_model
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


def test_wrapped_strategy_sees_its_own_plan():
    """The wrapped strategy sees its own plan alone."""
    strategy = make_strategy(PLAN)
    assert isinstance(strategy, Standardised)
    assert (strategy.inner.run.origins, strategy.inner.run.max_models) == (2, PLAN.max_models - 1)
    assert strategy.inner.run.recipe.settings == PLAN.without_statistics.recipe.settings
    assert plan_settings(PLAN).k == 2
    assert models_needed(PLAN) == 2 * models_needed(PLAN.without_statistics) + 1
    assert PLAN.without_statistics.without_statistics == PLAN.without_statistics


def test_all_report_first_from_zero_origin():
    """All available devices report first from the zero origin."""
    strategy = fedavg(participation=0.1)
    _, plan = strategy.plan(strategy.init(DEVICES), 1, DEVICES)
    assert plan.assignments == dict.fromkeys(DEVICES, STATISTICS_ASSIGNMENT)
    assert plan.models == {STATISTICS_MODEL: ClusterModel(1)}
    assert not plan.trains


def test_mean_becomes_the_model_then_begins():
    """Their mean is the model and the strategy begins."""
    strategy = fedavg()
    state, outcome = after_statistics(strategy)
    np.testing.assert_allclose(state.slot.offset, 1.0)
    assert (outcome.clusters, outcome.events[0].kind, outcome.events[0].detail) == ({}, "statistics", {"devices": 3})
    after, plan = strategy.plan(dataclasses.replace(state, slot=ClusterModel(7, version=1)), 2, DEVICES)
    assert {d: o.phase for d, o in plan.assignments.items()} == dict.fromkeys(DEVICES, Phase.TRAIN)
    assert plan.models == {0: ClusterModel(), STATISTICS_MODEL: ClusterModel(7, version=1)}
    after, outcome = strategy.close(after, plan, [contribution("dev-1", np.ones(D, np.float32), round=2)])
    np.testing.assert_allclose(after.inner.slot.offset, 1.0)
    assert outcome.clusters == dict.fromkeys(DEVICES, 0)
    assert set(strategy.models_of(after)) == {0, STATISTICS_MODEL}
    assert set(strategy.final(after, 9, DEVICES).models) == {0, STATISTICS_MODEL}


def test_too_few_statistics_are_asked_again():
    """Too few statistics are asked for again."""
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


def test_other_plan_offers_statistics_too(monkeypatch):
    """The other plan of a strategy offers the statistics too."""
    strategy = fedavg()
    state = dataclasses.replace(strategy.init(DEVICES), slot=ClusterModel(7, version=1))
    second = RoundPlan(2, {5: ClusterModel()}, {})
    both = (state.inner, RoundPlan(2, {0: ClusterModel()}, {}, otherwise=(state.inner, second)))
    monkeypatch.setattr(strategy.inner, "plan", lambda *_: both)
    other = strategy.plan(state, 2, DEVICES)[1].otherwise
    assert (set(other[1].models), other[0]) == ({5, STATISTICS_MODEL}, state)


def test_used_up_models_are_refused(monkeypatch):
    """A strategy that has used up its models is refused."""
    strategy = fedavg()
    state = dataclasses.replace(strategy.init(DEVICES), slot=ClusterModel(7, version=1))
    full = RoundPlan(2, {STATISTICS_MODEL: ClusterModel()}, {})
    monkeypatch.setattr(strategy.inner, "plan", lambda *_: (state.inner, full))
    with pytest.raises(ConfigError, match="has used up its models") as caught:
        strategy.plan(state, 2, DEVICES)
    assert "locally" in caught.value.hint


# ------------------------------------------------------------------------------------------- statistics of clusters

MANY = tuple(f"dev-{i}" for i in range(8))


def cfl():
    return make_strategy(run_plan("cfl", {STATISTICS_SETTING: "on"}, origins=2, min_contributors=3, max_models=2049))


def settled_state(strategy, state, round_):
    """Return the state as it is between two rounds, all models at states that devices hold."""
    held = getattr(strategy, "held", States.of_origins(2))
    state, strategy.held, _ = settle(state, strategy.models_of(state), held, round_)
    encoded = encode_state(state)
    return decode_state(strategy.state_type, encoded.document, encoded.arrays)


def played(strategy, state, round_, available, answer, gain=lambda _: 0.5):
    """Play a round in which each device uploads what ``answer`` gives; return the state, the plan and the events."""
    state, plan = strategy.plan(state, round_, available)
    given = [
        dataclasses.replace(
            contribution(d, answer(d, order), model=order.scored[len(order.scored) > 1 and d >= "dev-4"], round=round_),
            phase=order.phase,
            margins=(0.5, gain(d)),
        )
        for d, order in sorted(plan.assignments.items())
    ]
    state, outcome = strategy.close(state, plan, given)
    return settled_state(strategy, state, round_), plan, outcome.events


def of_its_group(device, order):
    """Return statistics by which the last four devices differ from the others, or any update."""
    values = np.linspace(-1, 1, D)
    if order.phase is Phase.STATISTICS and device >= "dev-4":
        values = values[::-1]
    return values + 0.01 * np.random.default_rng(int(device[-1])).standard_normal(D)


def test_cfl_tries_the_cut_that_they_show():
    strategy = cfl()
    state, _, _ = played(strategy, strategy.init(MANY), 1, MANY, of_its_group)
    state, plan, events = played(strategy, state, 2, MANY, of_its_group)
    assert (plan.trains, [e.kind for e in events]) == (True, ["trial-opened"])
    state, plan, events = played(strategy, state, 3, MANY, of_its_group)
    asked = {d: order.candidates for d, order in plan.assignments.items()}
    assert asked == {d: (statistics_model(half), half) for d in MANY for half in (1 + (d >= "dev-4"),)}
    assert [e.detail for e in events] == [{"cluster": 1, "devices": 4}, {"cluster": 2, "devices": 4}]
    assert (set(state.own), state.taken) == ({1, 2}, (MANY, MANY[:4], MANY[4:]))
    # The control trains by itself first: updates in another scale say nothing about it.
    state, plan, _ = played(strategy, state, 4, MANY, of_its_group)
    assert {order.candidates[0] for order in plan.assignments.values()} == {0}
    assert {statistics_model(1), statistics_model(2), STATISTICS_MODEL} <= set(plan.models)
    for round_ in range(5, 18):
        state, plan, events = played(strategy, state, round_, MANY, of_its_group)
        if any(event.kind == "split" for event in events):
            break
    assert set(state.inner.clusters) == {1, 2}
    final = strategy.final(state, 18, MANY)
    assert {final.models[statistics_model(m)] for m in (1, 2)} == set(state.own.values())


def test_a_side_that_loses_keeps_the_control():
    strategy, events, round_ = cfl(), [], 0
    state = strategy.init(MANY)
    while not any(event.kind == "split" for event in events):
        round_ += 1
        state, plan, events = played(
            strategy, state, round_, MANY, of_its_group, lambda d: -0.1 if d >= "dev-4" else 0.5
        )
    own, as_before = (state.inner.clusters[m] for m in sorted(state.inner.clusters))
    assert (own.id, own.members, as_before.members) == (1, MANY[:4], MANY[4:])
    assert as_before.id > 2
    assert as_before.slot == plan.models[0]
    _, plan, _ = played(strategy, state, round_ + 1, MANY, of_its_group)
    assert plan.trains
    assert plan.models[statistics_model(own.id)] == state.own[1]
    assert plan.models[statistics_model(as_before.id)] == state.slot


def test_a_half_too_small_keeps_the_scale():
    strategy = cfl()
    state, _, _ = played(strategy, strategy.init(MANY), 1, MANY, of_its_group)
    state, _, _ = played(strategy, state, 2, MANY, of_its_group)
    # Of a half of four, one that is away could be told from all and the other three: so none of them is asked.
    state, plan, _ = played(strategy, state, 3, MANY[:-1], of_its_group)
    assert set(plan.assignments) == set(MANY[:4])
    state, plan, _ = played(strategy, state, 4, MANY[:-1], of_its_group)
    assert plan.models[statistics_model(2)] == state.slot
    assert plan.models[statistics_model(1)] != state.slot
    assert played(strategy, state, 5, MANY, of_its_group)[1].assignments["dev-7"].phase is Phase.TRIAL


def test_ifca_asks_once_choices_are_steady():
    strategy = make_strategy(run_plan("ifca", {"k": 2, STATISTICS_SETTING: "on"}, origins=3, min_contributors=3))
    strategy.held = States.of_origins(3)
    state, plans = strategy.init(MANY), {}
    for round_ in range(1, 14):
        state, plans[round_], _ = played(strategy, state, round_, MANY, of_its_group)
    asked = {r: {o.phase for o in plan.assignments.values()} for r, plan in plans.items()}
    assert [r for r, phases in asked.items() if phases == {Phase.STATISTICS}] == [1, 6]
    assert state.taken == (MANY, MANY[:4], MANY[4:])
    # Models learn their new scale as long as they have learned the one before.
    own = {r: {o.candidates for o in plan.assignments.values()} for r, plan in plans.items()}
    assert all(own[r] == {(0,), (1,)} for r in range(7, 13))
    assert own[5] == own[13] == {(0, 1)}
    assert set(plans[12].seal) == {0, 1}
