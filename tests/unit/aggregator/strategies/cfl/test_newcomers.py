"""Devices that join later, or whose update was missing when their cluster was split."""

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel, place_assignment, train_assignment
from aggregator.strategies.cfl.newcomers import assignments, join, place, welcome
from aggregator.strategies.cfl.split_validation import Half, Trial
from aggregator.strategies.cfl.state import ROOT, CflState, Cluster
from aggregator.strategies.cfl.tree import BASES, EDGES, Node, leaves
from shoal.protocol.messages import Phase
from tests.helpers.plans import altered, contribution
from tests.unit.aggregator.strategies.cfl.quadratics import (
    ALG_5,
    DEVICES,
    GOAL,
    GROUP_OF,
    GROUPS,
    NOISE,
    TRIED,
    D,
    Quadratic,
    cfl,
    everybody,
    partition,
    ran,
    settled_tree,
)

NEWCOMERS = {f"new-{(17 * i) % 97:02d}": "abcd"[i % 4] for i in range(20)}
"""Twenty devices whose ids are neither contiguous nor in order of their groups."""


def goals_with(groups, noise=0.05, seed=3):
    rng = np.random.default_rng(seed)
    late = {d: GOAL[g] + noise * rng.standard_normal(D) for d, g in groups.items()}
    return {**{d: GOAL[g] for d, g in GROUP_OF.items()}, **late}


def test_other_plan_scores_all_leaves():
    """The other plan lets newcomers score all leaves."""
    rounds = settled_tree()
    _, plan = rounds.strategy.plan(rounds.state, rounds.round + 1, (*DEVICES, *NEWCOMERS))
    assert {plan.assignments[d].phase for d in NEWCOMERS} == {Phase.PLACE}
    _, other = plan.otherwise
    assert {other.assignments[d].candidates for d in NEWCOMERS} == {tuple(sorted(rounds.state.clusters))}
    assert {d: o for d, o in other.assignments.items() if d in DEVICES} == {
        d: o for d, o in plan.assignments.items() if d in DEVICES
    }
    assert set(plan.models) > set(other.models)


@pytest.mark.parametrize("participation", [1.0, 0.2])
def test_twenty_newcomers_join_their_groups(participation):
    """Alg. 4: they walk down three nested splits, one edge a round, however few devices are drawn for training."""
    rounds = settled_tree()
    run = altered(rounds.strategy.run, participation=participation)
    rounds.strategy = type(rounds.strategy)(run)
    answer = Quadratic(rounds, goals_with(NEWCOMERS))
    begun = rounds.round
    rounds.go(answer, 4, present=(*DEVICES, *NEWCOMERS))
    joined = {e.detail["device"]: (e.round - begun, e.detail["by"]) for e in rounds.events if e.kind == "newcomer"}
    assert set(joined) == set(NEWCOMERS)
    assert {by for _, by in joined.values()} == {"direction"}
    assert {round_ for round_, _ in joined.values()} == {1, 2, 3}
    assert {frozenset(c) for c in partition(rounds)} == {
        frozenset((*GROUPS[g], *(d for d, own in NEWCOMERS.items() if own == g))) for g in GROUPS
    }
    assert everybody(rounds.state) == sorted((*DEVICES, *NEWCOMERS))


@pytest.mark.parametrize("settings", [ALG_5, TRIED])
def test_edges_directions_are_mean_updates(settings):
    """Each device's update leads from theta* to its goal, so an edge's direction leads to the mean goal of its side."""
    rounds, _ = ran(40, **settings)
    assert len(rounds.state.tree) == 3
    clusters = {c.id: c.members for c in rounds.state.clusters.values()}
    for node in rounds.state.tree.values():
        base, *ends = node.edges
        if settings is TRIED:
            assert base == node.slot
        for child, end in zip(node.children, ends, strict=True):
            below = (
                [d for leaf in leaves(rounds.state.tree, child) for d in clusters[leaf]]
                if (child in rounds.state.tree)
                else clusters[child]
            )
            goal = np.mean([GOAL[GROUP_OF[d]] + NOISE[d] for d in below], 0)
            np.testing.assert_allclose(rounds.theta(end), goal, atol=1e-4)


def by_loss(rounds):
    """Make the strategy follow its other plan, as it is if no device can hand a model over."""
    plan = rounds.strategy.plan

    def other(state, round_, available):
        planned = plan(state, round_, available)
        return planned[1].otherwise or planned

    rounds.strategy.plan = other
    return rounds


def test_newcomer_in_first_trial_joins_after():
    """A newcomer during the first trial joins when it is over."""
    rounds = cfl(**TRIED)
    answer = Quadratic(rounds, goals_with({"dev-99": "a"}))
    while not rounds.state.trials:
        rounds.step(answer)
    assert "dev-99" not in rounds.step(answer, present=(*DEVICES, "dev-99")).clusters
    plan = rounds.strategy.final(rounds.state, 9, (*DEVICES, "dev-99"))
    assert plan.assignments["dev-99"].candidates == (0,), "should the run end now, it gets the root's model"
    rounds.go(answer, 30, present=(*DEVICES, "dev-99"))
    (own,) = [c for c in rounds.state.clusters.values() if "dev-99" in c.members]
    assert set(own.members) == {*GROUPS["a"], "dev-99"}


def test_newcomers_update_moves_its_leaf():
    """A newcomers update moves the leaf that it chose and no other."""
    rounds = by_loss(settled_tree())
    root = rounds.state.tree[0].slot
    answer = Quadratic(rounds, goals_with({"dev-99": "b"}))
    before = {c.id: rounds.theta(c.slot) for c in rounds.state.clusters.values()}
    there = ("dev-02", "dev-99")
    rounds.step(lambda d, o, r: answer(d, o, r) if d in there else None, present=(*DEVICES, "dev-99"))
    assert rounds.state.tree[0].slot is root
    for cluster in rounds.state.clusters.values():
        assert np.array_equal(rounds.theta(cluster.slot), before[cluster.id]) is ("dev-99" not in cluster.members)


# ------------------------------------------------------------------------------------------- single steps, by hand


def towards(axis, device="", **changes):
    """Return an update of length one along an axis."""
    return contribution(device or f"dev-{axis}", np.eye(D)[axis], **changes)


def leaf(id_, *members):
    return Cluster(id_, members, ClusterModel(id_))


def trial(cluster):
    halves = (Half(50, ("x",), ClusterModel()), Half(51, ("y",), ClusterModel()))
    return Trial(cluster, *halves, ClusterModel(), figures={})


LEAVES = {2: leaf(2, "dev-2"), 3: leaf(3, "dev-3"), 4: leaf(4, "dev-4")}
TREE = {
    0: Node(0, ClusterModel(), (1, 4)),
    1: Node(1, ClusterModel(), (2, 3)),
}
STATE = CflState(clusters=LEAVES, tree=TREE)
FLAT = CflState(clusters={ROOT: leaf(ROOT, "dev-1")})


def test_new_devices_join_in_name_order():
    """New devices join the only cluster in name order."""
    after = welcome(FLAT, {"new-2", "dev-1", "new-1"})
    assert after.clusters[ROOT].members == ("dev-1", "new-1", "new-2")
    assert not after.unplaced
    assert FLAT.clusters[ROOT].members == ("dev-1",), "the earlier state does not change"
    tried = dataclasses.replace(FLAT, trials={ROOT: trial(ROOT)})
    assert welcome(tried, {"new-1"}) is tried, "they wait while the only cluster is on trial"


def test_after_split_newcomers_start_at_root():
    """After a split new devices start at the root and those on their way go on."""
    state = dataclasses.replace(STATE, unplaced={"new-1": 1})
    after = welcome(state, {"dev-2", "new-1", "new-2"})
    assert (after.unplaced, after.clusters) == ({"new-1": 1, "new-2": ROOT}, LEAVES)
    assert welcome(state, {"dev-2", "new-1"}) is state


WITH_EDGES = {
    k: dataclasses.replace(n, edges=tuple(ClusterModel(10 * k + i) for i in range(3))) for k, n in TREE.items()
}


def test_unplaced_devices_compare_edges():
    """Unplaced devices compare the edges of their nodes."""
    state = dataclasses.replace(STATE, tree={**TREE, 1: WITH_EDGES[1]}, unplaced={"new-1": 1, "new-2": 0, "away": 1})
    asked = assignments(state, {"new-1", "new-2", "dev-2"})
    assert asked == {
        "new-1": place_assignment(BASES + 1, (EDGES + 2, EDGES + 3)),
        "new-2": train_assignment((2, 3, 4), evaluate=False),
    }
    assert WITH_EDGES[1].compared == {
        BASES + 1: ClusterModel(10),
        EDGES + 2: ClusterModel(11),
        EDGES + 3: ClusterModel(12),
    }
    assert assignments(state, {"new-1"}, by_loss=True)["new-1"].candidates == (2, 3)
    assert dataclasses.replace(WITH_EDGES[1], children=(2, BASES)).compared == {}, "the ids would be taken"


def test_chosen_edge_leads_down_or_to_a_leaf():
    """A device that chose an edge goes down to a node or becomes a member of a leaf."""
    state = dataclasses.replace(STATE, tree=WITH_EDGES, unplaced={"new-1": 0, "new-2": 0, "new-3": 1, "new-4": 1})
    state = dataclasses.replace(state, trials={3: trial(3)})
    chosen = {"new-1": 1, "new-2": 4, "new-3": 3, "new-4": 2, "dev-2": 4}
    given = [contribution(d, phase=Phase.PLACE, nearest=EDGES + child) for d, child in chosen.items()]
    after, events = place(state, given, 9)
    assert after.unplaced == {"new-1": 1, "new-3": 1}, "a leaf on trial takes no members"
    assert {k: c.members for k, c in after.clusters.items()} == {
        2: ("dev-2", "new-4"),
        3: ("dev-3",),
        4: ("dev-4", "new-2"),
    }
    assert [(e.round, e.kind, e.detail) for e in events] == [
        (9, "newcomer", {"device": d, "cluster": c, "by": "direction"}) for d, c in (("new-2", 4), ("new-4", 2))
    ]
    assert place(state, [towards(0, "new-1", model=2)], 9) == (state, ())


def test_leaves_on_trial_are_not_scored():
    state = dataclasses.replace(STATE, unplaced={"new-1": 0}, trials={3: trial(3)})
    assert assignments(state, {"new-1"})["new-1"].candidates == (2, 4)
    state = dataclasses.replace(state, trials={n: trial(n) for n in (2, 3, 4)})
    assert assignments(state, {"new-1"}) == {}, "it waits"


@pytest.mark.parametrize(
    "update",
    [
        towards(0, "dev-2", model=3),
        towards(0, "new-1", model=1),
        towards(0, "new-1", model=3, phase=Phase.TRIAL),
        towards(0, "new-1", model=3, phase=Phase.SCORE),
    ],
    ids=["a member", "a node", "a trial", "only scored"],
)
def test_no_other_update_makes_a_member(update):
    """No other update makes a member by loss."""
    state = dataclasses.replace(STATE, unplaced={"new-1": 0})
    assert join(state, [update], 9) == (state, ())


def test_leaf_chosen_by_loss_has_a_member():
    """A device that chose a leaf by loss becomes its member."""
    state = dataclasses.replace(STATE, unplaced={"new-1": 0, "new-2": 0, "new-3": 0})
    given = [towards(0, "new-1", model=3), towards(0, "new-2", model=3), towards(0, "dev-2", model=2)]
    after, events = join(state, given, 9)
    assert (after.clusters[3].members, after.unplaced) == (("dev-3", "new-1", "new-2"), {"new-3": 0})
    assert {n: c.members for n, c in after.clusters.items() if n != 3} == {2: ("dev-2",), 4: ("dev-4",)}
    details = [{"device": d, "cluster": 3, "by": "loss"} for d in ("new-1", "new-2")]
    assert [(e.round, e.kind, e.detail) for e in events] == [(9, "newcomer", d) for d in details]
