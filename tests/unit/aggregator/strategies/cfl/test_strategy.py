"""CFL on synthetic updates: splits as device ids, and where there is none."""

import numpy as np
import pytest

from aggregator.strategies.cfl import tree as cfl_tree
from shoal.errors import ConfigError
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import Phase
from tests.helpers.plans import Rounds, altered, run_plan
from tests.unit.aggregator.strategies.cfl.quadratics import (
    ALG_5,
    DEVICES,
    GOAL,
    GROUP_OF,
    NOISE,
    TRIED,
    TRUTH,
    D,
    Quadratic,
    cfl,
    everybody,
    partition,
    ran,
    settled_tree,
)


def test_nested_splits_give_the_groups():
    """Sub-splits are device ids, never positions: nobody is orphaned, nobody is in two clusters."""
    rounds, answer = ran(12, **ALG_5)
    assert partition(rounds) == TRUTH
    assert len([e for e in rounds.events if e.kind == "split"]) == len(rounds.state.tree) == 3
    assert sorted(len(cfl_tree.path(rounds.state.tree, leaf)) for leaf in rounds.state.clusters) == [2, 3, 4, 4]
    assert not rounds.state.unplaced
    assert set(rounds.step(answer).clusters) == set(DEVICES)


def test_children_start_from_the_parent():
    """Children of an unvalidated split start from the parents model and their own mean."""
    rounds, answer = ran(0, **ALG_5)
    rounds.step(answer)
    parent = rounds.theta(rounds.state.clusters[0].slot)
    rounds.step(answer)
    assert 0 not in rounds.state.clusters
    for cluster in rounds.state.clusters.values():
        mean = np.mean([GOAL[GROUP_OF[d]] + NOISE[d] - parent for d in cluster.members], axis=0)
        np.testing.assert_allclose(rounds.theta(cluster.slot), parent + mean, atol=1e-5)
        assert rounds.contributors(cluster.slot) == len(cluster.members)


# ---------------------------------------------------------------------------------------------------- when to split


def test_warm_up_and_cool_down():
    """Warm up and cool down put splits off."""
    rounds, _ = ran(20, **{**ALG_5, "cool_down": 4}, warm_up=5)
    assert [e.round for e in rounds.events if e.kind == "split"] == [6, 11, 16]
    assert partition(rounds) == TRUTH


@pytest.mark.parametrize(("settings", "changes"), [({"min_side": 4}, {}), ({}, {"min_contributors": 4})])
def test_no_side_is_smaller_than_it_may_be(settings, changes):
    """Groups of three can't be cut off where a side, or a mean, needs four."""
    rounds, _ = ran(8, changes=changes, **ALG_5, **settings)
    assert set(rounds.state.clusters) == {0}


@pytest.mark.parametrize(
    ("settings", "clusters"), [({}, {1, 2}), ({"min_side": 2}, {0})], ids=["as published", "two a side"]
)
def test_single_outlier_only_as_published(settings, clusters):
    """A single outlier is a group only as published."""
    goals = {d: np.zeros(D) for d in DEVICES} | {DEVICES[0]: 9.0 * np.eye(D)[3]}
    rounds = cfl(**ALG_5, **settings)
    rounds.go(Quadratic(rounds, goals), 8)
    assert set(rounds.state.clusters) == clusters


@pytest.mark.parametrize("path", ["off", "on"])
def test_final_round_gives_each_its_model(path):
    """With `path` also every model between its leaf's and the root's."""
    rounds = settled_tree(path=path)
    present = (*DEVICES, "dev-99")
    state, _ = rounds.strategy.plan(rounds.state, 50, present)
    plan = rounds.strategy.final(state, 51, present)
    assert (plan.final, set(plan.assignments)) == (True, set(present))
    assert plan.assignments["dev-99"].candidates == (0,)
    for cluster in state.clusters.values():
        way = cfl_tree.path(state.tree, cluster.id)[::-1] if path == "on" else (cluster.id,)
        assert {plan.assignments[d].candidates for d in cluster.members} == {way}
    if path == "on":
        assert set(plan.models) == {*state.clusters, *state.tree}
        assert all(plan.models[n] is node.slot for n, node in state.tree.items())


def test_shared_segment_is_refused():
    with pytest.raises(ConfigError, match="shared"):
        Rounds(run_plan("cfl", segments=(SegmentSpec("shared", 3), SegmentSpec("cluster", 3))), DEVICES)


# -- CFL while devices take part in turn, stay away or leave: every device is in one cluster or on its way to one --


def test_long_silent_devices_are_forgotten():
    """Devices that have long been silent are forgotten."""
    rounds, answer = ran(0, **{**ALG_5, "eps1": 1e-9}, max_age=3)
    rounds.step(answer)
    half = DEVICES[:6]
    for age in range(1, 5):
        rounds.step(answer, present=half)
        assert (len(rounds.state.heard) == 12) == (age <= 3)
    assert set(rounds.state.heard.values()) == {5}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("settings", [{**ALG_5, "eps1": 0.3}, TRIED], ids=["unvalidated", "validated"])
def test_three_splits_leave_no_orphan(settings, seed):
    """Six of twelve a round, drawn by the plan: after every round each device is in one cluster or on its way."""
    rounds, answer = ran(0, changes={"participation": 0.5, "seed": seed}, **settings)
    for _ in range(150):
        rounds.step(answer)
        assert everybody(rounds.state) == sorted(DEVICES)
        assert set(rounds.state.unplaced.values()) <= set(rounds.state.tree)
    assert len(rounds.state.tree) >= 3
    if settings is TRIED:  # Alg. 5 alone may take a chance draw for a stationary point and cut a group
        assert partition(rounds) == TRUTH


def test_device_away_at_a_cut_is_in_no_half():
    """A device that is away when its cluster is cut is in neither half."""
    away = "dev-11"
    rounds, answer = ran(0, **ALG_5)
    while not rounds.state.tree:
        rounds.step(answer)
    home = next(c for c in rounds.state.clusters.values() if away in c.members)
    assert len(home.members) > 3
    while home.id not in rounds.state.tree:
        rounds.step(answer, present=[d for d in DEVICES if d != away])
    assert rounds.state.unplaced == {away: home.id}
    rounds.go(answer, 12)
    assert partition(rounds) == TRUTH


def test_group_that_left_holds_nobody_up():
    """Without updates of it no cut is suggested, so no trial waits for it for ever."""
    rounds = cfl(**TRIED, max_age=6)
    answer = Quadratic(rounds, {d: GOAL["c"] if g == "c" else GOAL["a"] for d, g in GROUP_OF.items()})
    rounds.step(answer)
    stay = [d for d in DEVICES if GROUP_OF[d] != "c"]
    rounds.go(answer, 60, present=stay)
    assert len([e.round for e in rounds.events if e.detail.get("reason") == "devices absent"]) <= 1
    assert set(rounds.state.heard) <= set(stay)
    slot = next(c.slot for c in rounds.state.clusters.values() if stay[0] in c.members)
    np.testing.assert_allclose(rounds.theta(slot), GOAL["a"], atol=0.1)


def test_trial_asks_more_where_few_are_drawn():
    """A tenth of twelve is one device: a half of three could never be averaged, so all of it that is there trains."""
    rounds, _ = ran(2, **TRIED)
    (trial,) = rounds.state.trials.values()
    run = altered(rounds.strategy.run, participation=0.1)
    strategy = type(rounds.strategy)(run)
    _, plan = strategy.plan(rounds.state, 3, tuple(sorted(d for d in DEVICES if d != "dev-90")))
    assert {o.phase for o in plan.assignments.values()} == {Phase.TRIAL}
    for half in (trial.left, trial.right):
        assert {d for d in half.members if d in plan.assignments} == set(half.members) - {"dev-90"}


def test_absent_trial_leaves_others_at_work():
    """A member without an update is in neither half. If it alone is online, it trains the cluster's model and the trial ends."""
    rounds = cfl(**TRIED)
    late, *early = DEVICES
    rounds.go(Quadratic(rounds), 2, present=tuple(early))
    (trial,) = rounds.state.trials.values()
    assert late in rounds.state.clusters[trial.cluster].members
    state, plan = rounds.strategy.plan(rounds.state, 3, (late,))
    assert {d: (o.phase, o.candidates) for d, o in plan.assignments.items()} == {late: (Phase.TRAIN, (trial.cluster,))}
    assert not state.trials
    _, plan = rounds.strategy.plan(rounds.state, 3, DEVICES)
    assert {o.phase for o in plan.assignments.values()} == {Phase.TRIAL}
    assert late not in plan.assignments
