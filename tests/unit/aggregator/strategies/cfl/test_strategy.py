"""CFL on synthetic updates: splits as device ids, and where there is none."""

import numpy as np
import pytest

from aggregator.strategies.cfl import tree as cfl_tree
from shoal.errors import ConfigError
from shoal.protocol.documents import SegmentSpec
from tests.helpers.plans import Rounds, run_plan
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
    partition,
    run_until_quiet,
)


def test_nested_splits_give_the_groups():
    """Sub-splits are device ids, never positions: nobody is orphaned, nobody is in two clusters."""
    rounds = cfl(**ALG_5)
    run_until_quiet(rounds, Quadratic(rounds), most=12)
    assert partition(rounds) == TRUTH
    cuts = [e for e in rounds.events if e.kind == "split"]
    assert len(cuts) == len(rounds.state.tree) == 3
    depths = sorted(len(cfl_tree.path(rounds.state.tree, leaf)) for leaf in rounds.state.clusters)
    assert depths == [2, 3, 4, 4]
    assert not rounds.state.unplaced
    outcome = rounds.step(Quadratic(rounds))
    assert set(outcome.clusters) == set(DEVICES)


def test_nested_splits_survive_absences():
    """A third of the devices is missing in every round, and those that are missing at a split choose among the leaves."""
    rounds = cfl(**{**ALG_5, "eps1": 0.6})
    answer, rng = Quadratic(rounds), np.random.default_rng(2)
    for _ in range(60):
        rounds.step(answer, present=rng.choice(DEVICES, 8, replace=False).tolist())
    members = [d for c in rounds.state.clusters.values() for d in c.members] + list(rounds.state.unplaced)
    assert sorted(members) == sorted(DEVICES)
    for cluster in partition(rounds):
        assert len({GROUP_OF[d] for d in cluster}) == 1


@pytest.mark.parametrize("linkage", ["single", "complete"])
def test_both_linkages_find_clear_groups(linkage):
    rounds = cfl(**ALG_5, linkage=linkage)
    run_until_quiet(rounds, Quadratic(rounds), most=12)
    assert partition(rounds) == TRUTH


def test_children_start_from_the_parent():
    """Children of an unvalidated split start from the parents model and their own mean."""
    rounds = cfl(**ALG_5)
    answer = Quadratic(rounds)
    rounds.step(answer)
    parent = rounds.theta(rounds.state.clusters[0].slot)
    rounds.step(answer)
    assert 0 not in rounds.state.clusters
    for cluster in rounds.state.clusters.values():
        mean = np.mean([GOAL[GROUP_OF[d]] + NOISE[d] - parent for d in cluster.members], axis=0)
        np.testing.assert_allclose(rounds.theta(cluster.slot), parent + mean, atol=1e-5)
        assert rounds.contributors(cluster.slot) == len(cluster.members)


# ---------------------------------------------------------------------------------------------------- when to split


@pytest.mark.parametrize("limit", [{"eps1": 1e-9}, {"eps2": 1e9}])
def test_no_split_before_its_time(limit):
    """While the mean still moves, or where every update is small."""
    rounds = cfl(**{**ALG_5, **limit})
    run_until_quiet(rounds, Quadratic(rounds), most=8)
    assert set(rounds.state.clusters) == {0}


def test_relative_form_uses_early_norms():
    """The relative form measures against the rounds and the early norms."""
    rounds = cfl(form="relative", eps1=0.4, eps2=0.05, validate="off", cool_down=0)
    run_until_quiet(rounds, Quadratic(rounds), most=14)
    assert partition(rounds) == TRUTH


def test_gamma_max_forbids_noise():
    """Eq. 39: split only if gamma_max < sqrt((1 - alpha_cross_max) / 2)."""
    open_, shut = cfl(**ALG_5, gamma_max=0.1), cfl(**ALG_5, gamma_max=0.999)
    for rounds in (open_, shut):
        run_until_quiet(rounds, Quadratic(rounds), most=12)
    assert partition(open_) == TRUTH
    assert set(shut.state.clusters) == {0}


def test_warm_up_and_cool_down():
    """Warm up and cool down put splits off."""
    rounds = cfl(**{**ALG_5, "cool_down": 4}, warm_up=5)
    run_until_quiet(rounds, Quadratic(rounds), most=20)
    assert [e.round for e in rounds.events if e.kind == "split"] == [6, 11, 16]
    assert partition(rounds) == TRUTH


@pytest.mark.parametrize(("settings", "changes"), [({"min_side": 4}, {}), ({}, {"min_contributors": 4})])
def test_no_side_is_smaller_than_it_may_be(settings, changes):
    """Groups of three can't be cut off where a side, or a mean, needs four."""
    rounds = cfl(changes=changes, **ALG_5, **settings)
    run_until_quiet(rounds, Quadratic(rounds), most=8)
    assert set(rounds.state.clusters) == {0}


@pytest.mark.parametrize(
    ("settings", "clusters"), [({}, {1, 2}), ({"min_side": 2}, {0})], ids=["as published", "two a side"]
)
def test_single_outlier_only_as_published(settings, clusters):
    """A single outlier is a group only as published."""
    goals = {d: np.zeros(D) for d in DEVICES} | {DEVICES[0]: 9.0 * np.eye(D)[3]}
    rounds = cfl(**ALG_5, **settings)
    run_until_quiet(rounds, Quadratic(rounds, goals), most=8)
    assert set(rounds.state.clusters) == clusters


def settled_tree():
    rounds = cfl(**ALG_5)
    run_until_quiet(rounds, Quadratic(rounds), most=12)
    return rounds


def test_final_round_gives_each_its_model():
    """The final round gives everybody its clusters model."""
    rounds = settled_tree()
    rounds.step(Quadratic(rounds))
    NOISE["dev-99"] = np.zeros(D)
    state, _ = rounds.strategy.plan(rounds.state, 50, (*DEVICES, "dev-99"))
    plan = rounds.strategy.final(state, 51, (*DEVICES, "dev-99"))
    assert plan.final
    assert set(plan.assignments) == {*DEVICES, "dev-99"}
    assert plan.assignments["dev-99"].candidates == (0,)
    for cluster in rounds.state.clusters.values():
        assert all(plan.assignments[d].candidates == (cluster.id,) for d in cluster.members)


@pytest.mark.parametrize("after", [1, 4, 7, 10])
@pytest.mark.parametrize("settings", [ALG_5, TRIED], ids=["unvalidated", "trials"])
def test_dump_and_load_change_nothing_later(settings, after):
    """The state is dumped and loaded after any round, in mid-trial too: the same splits, models and tree follow."""
    results = []
    for reload in (False, True):
        rounds = cfl(**settings)
        answer = Quadratic(rounds)
        for i in range(14):
            if reload and i == after:
                assert rounds.reload().arrays == {}
            rounds.step(answer)
        models = {
            c.id: (c.members, rounds.theta(c.slot).tobytes(), c.quiet_until) for c in rounds.state.clusters.values()
        }
        trials = {t.cluster: (t.left.members, t.trained, t.waited) for t in rounds.state.trials.values()}
        results.append((models, trials, rounds.state.early_norm, rounds.state.next_id, sorted(rounds.state.tree)))
    assert results[0] == results[1]


# ---------------------------------------------------------------------------------------------------- tree, newcomers


# ---------------------------------------------------------------------------------------------------- dump and load


def test_shared_segment_is_refused():
    with pytest.raises(ConfigError, match="shared"):
        Rounds(run_plan("cfl", segments=(SegmentSpec("shared", 3), SegmentSpec("cluster", 3))), DEVICES)
