"""Devices that change clusters in CFL: whom a cut or an edge misled, and whose data have changed."""

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.base import Slot
from aggregator.strategies.cfl_moves import MOST_OFFERED, look_due, move, offered
from aggregator.strategies.cfl_state import CflSettings, CflState, Cluster
from aggregator.strategies.cfl_tree import Node
from aggregator.strategies.cfl_trial import Half, Trial
from tests.helpers.plans import contribution
from tests.helpers.quadratics import (
    ALG_5,
    DEVICES,
    GOAL,
    GROUP_OF,
    GROUPS,
    NOISE,
    TRUTH,
    Quadratic,
    cfl,
    partition,
    run_until_quiet,
)
from wire.errors import ConfigError
from wire.messages import Phase

LOOKING = {**ALG_5, "look_every": 7}


class Misled(Quadratic):
    """Until the first cut one device of group a sends updates like those of group b."""

    def __call__(self, device, order, round_):
        if device == "dev-90" and not self.rounds.state.tree:
            vector = GOAL["b"] + NOISE[device] - self.theta(order.candidates[0])
            return contribution(device, vector, round=round_, model=order.candidates[0])
        return super().__call__(device, order, round_)


def edge_devices(rounds):
    return {n.id: [sorted(c.device for c in edge) for edge in n.edges] for n in rounds.state.tree.values()}


def test_a_device_that_the_cut_misled_comes_to_its_group():
    rounds = cfl(**LOOKING)
    answer = Misled(rounds)
    for _ in range(6):
        rounds.step(answer)
    assert partition(rounds) != TRUTH
    before = next(c.id for c in rounds.state.clusters.values() if "dev-90" in c.members)
    assert any("dev-90" in edge for edges in edge_devices(rounds).values() for edge in edges)
    rounds.step(answer)
    home = next(c.id for c in rounds.state.clusters.values() if "dev-33" in c.members)
    assert [dict(e.detail) for e in rounds.events if e.kind == "moved"] == [
        {"device": "dev-90", "from": before, "cluster": home}
    ]
    run_until_quiet(rounds, answer, most=20)
    assert partition(rounds) == TRUTH
    assert not any("dev-90" in edge for edges in edge_devices(rounds).values() for edge in edges), (
        "updates that misled the cut place no newcomer"
    )


def test_its_update_counts_in_its_new_cluster_in_the_same_round():
    rounds = cfl(**LOOKING)
    answer = Misled(rounds)
    for _ in range(7):
        rounds.step(answer)
    home = next(c for c in rounds.state.clusters.values() if "dev-33" in c.members)
    expected = GOAL["a"] + np.mean([NOISE[d] for d in GROUPS["a"]], axis=0)
    np.testing.assert_allclose(home.slot.offset, expected, atol=1e-5)


def test_a_device_whose_data_have_changed_changes_clusters():
    rounds = cfl(**LOOKING)
    answer = Quadratic(rounds)
    run_until_quiet(rounds, answer, most=14)
    assert partition(rounds) == TRUTH
    answer.goals["dev-40"] = GOAL["c"]
    for _ in range(7):
        rounds.step(answer)
    assert {frozenset((*GROUPS["c"], "dev-40")), frozenset(("dev-02", "dev-71"))} <= partition(rounds)


def test_without_looks_a_device_stays_where_the_cut_has_put_it():
    """Alg. 5 alone knows no way back, and it is what `validate=off` gives."""
    assert CflSettings(validate=False).look_rounds == 0
    assert CflSettings().look_rounds == 20
    rounds = cfl(**ALG_5)
    run_until_quiet(rounds, Misled(rounds), most=30)
    assert not [e for e in rounds.events if e.kind == "moved"]
    assert partition(rounds) != TRUTH


def test_models_are_offered_only_in_rounds_of_a_look():
    rounds = cfl(**LOOKING)
    answer = Quadratic(rounds)
    for _ in range(15):
        rounds.step(answer)
    asked = {r: {len(o.candidates) for r_, _, o in answer.orders if r_ == r} for r in range(1, 16)}
    assert {r for r, counts in asked.items() if counts != {1}} == {7, 14}
    assert asked[14] == {4}
    assert all(o.candidates[0] in rounds.state.clusters for r, _, o in answer.orders if r == 14)


def test_one_cluster_has_nothing_to_offer():
    state = CflState({0: Cluster(0, DEVICES, Slot())})
    assert not look_due(state, CflSettings(look_every=1), 5)


def test_a_check_of_a_split_waits_for_the_look_to_pass():
    rounds = cfl(**{**ALG_5, "merge_every": 5, "look_every": 5})
    answer = Quadratic(rounds)
    for _ in range(24):
        rounds.step(answer)
    scored = {r for r, _, o in answer.orders if o.phase == Phase.SCORE}
    assert scored
    assert not any(r % 5 == 0 for r in scored)


def chain(leaves):
    """Return a state whose tree cuts off one leaf after the other: 1, 2, 3, ... of 100, 101, 102, ..."""
    tree, inner = {}, 100
    for leaf in range(1, leaves - 1):
        tree[inner] = Node(inner, Slot(), (leaf, inner + 1), ((), ()))
        inner += 1
    tree[inner] = Node(inner, Slot(), (leaves - 1, leaves), ((), ()))
    clusters = {i: Cluster(i, (f"dev-{i}a", f"dev-{i}b"), Slot()) for i in range(1, leaves + 1)}
    return CflState(clusters, tree=tree)


def test_the_nearest_leaves_of_the_tree_are_offered_first():
    assert offered(chain(5), 4) == (4, 5, 3, 2, 1)
    assert offered(chain(5), 1) == (1, 2, 3, 4, 5)


def test_no_more_models_are_offered_than_a_device_should_fetch():
    assert len(offered(chain(40), 3)) == 1 + MOST_OFFERED


def test_leaves_on_trial_are_not_offered():
    state = chain(4)
    trial = Trial(2, Half(8, ("dev-2a",), Slot()), Half(9, ("dev-2b",), Slot()), (), {})
    assert offered(dataclasses.replace(state, trials={2: trial}), 4) == (4, 3, 1)


def update(device, model, phase=Phase.TRAIN):
    return contribution(device, np.ones(3), round=9, model=model, phase=phase)


@pytest.mark.parametrize(
    ("given", "least_side", "moves"),
    [
        ([update("dev-1a", 2)], 1, {"dev-1a": 2}),
        ([update("dev-1a", 2)], 2, {}),
        ([update("dev-1a", 2), update("dev-1b", 2)], 1, {"dev-1a": 2}),
        ([update("dev-1a", 2), update("dev-2a", 1)], 1, {"dev-1a": 2, "dev-2a": 1}),
        ([update("dev-1a", 1)], 1, {}),
        ([update("dev-1a", 77)], 1, {}),
        ([update("stranger", 2)], 1, {}),
        ([update("dev-1a", 2, Phase.SCORE)], 1, {}),
    ],
    ids=["one", "too-small", "the-last-stays", "two-swap", "stays", "no-leaf", "unknown", "scores"],
)
def test_who_may_move(given, least_side, moves):
    state, events = move(chain(3), given, least_side, 9)
    assert {e.detail["device"]: e.detail["cluster"] for e in events} == moves
    for device, leaf in moves.items():
        assert device in state.clusters[leaf].members
    members = [d for c in state.clusters.values() for d in c.members]
    assert sorted(members) == sorted(d for c in chain(3).clusters.values() for d in c.members)
    assert all(len(c.members) >= least_side for c in state.clusters.values())


def test_an_edge_keeps_its_last_updates():
    """One without any would place nobody by similarity."""
    state = chain(3)
    edges = ((update("dev-1a", 100),), (update("dev-2a", 100), update("dev-1b", 100)))
    state = dataclasses.replace(state, tree={**state.tree, 100: dataclasses.replace(state.tree[100], edges=edges)})
    state, _ = move(state, [update("dev-1a", 2), update("dev-2a", 1)], 1, 9)
    kept = [[c.device for c in edge] for edge in state.tree[100].edges]
    assert kept == [["dev-1a"], ["dev-1b"]]


def test_a_device_keeps_its_updates_on_edges_that_lead_to_its_new_leaf():
    state = chain(3)
    edges = ((update("dev-1a", 100),), (update("dev-2a", 100), update("dev-3a", 100)))
    state = dataclasses.replace(state, tree={**state.tree, 100: dataclasses.replace(state.tree[100], edges=edges)})
    state, events = move(state, [update("dev-2a", 3)], 1, 9)
    assert len(events) == 1
    assert [c.device for c in state.tree[100].edges[1]] == ["dev-2a", "dev-3a"]


def test_a_look_below_never_is_refused():
    with pytest.raises(ConfigError, match="look_every"):
        cfl(look_every=-2)


def test_groups_that_are_right_lose_nobody():
    rounds = cfl(**LOOKING)
    answer = Quadratic(rounds)
    for _ in range(40):
        rounds.step(answer)
    assert partition(rounds) == TRUTH
    assert not [e for e in rounds.events if e.kind == "moved"]
    assert set(GROUP_OF) == {d for c in rounds.state.clusters.values() for d in c.members}
