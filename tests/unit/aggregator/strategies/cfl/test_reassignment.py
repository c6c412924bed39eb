"""Devices that change clusters in CFL: whom a cut misled, and whose data have changed."""

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel
from aggregator.strategies.cfl.reassignment import MOST_OFFERED, look_due, move, offers
from aggregator.strategies.cfl.split_validation import Half, Trial
from aggregator.strategies.cfl.state import CflSettings, CflState, Cluster
from aggregator.strategies.cfl.tree import Node
from shoal.protocol.messages import Phase
from tests.helpers.plans import contribution
from tests.unit.aggregator.strategies.cfl.quadratics import (
    ALG_5,
    DEVICES,
    GOAL,
    GROUPS,
    NOISE,
    TRUTH,
    Quadratic,
    partition,
    ran,
)

LOOKING = {**ALG_5, "min_side": 2, "look_every": 7}


class Misled(Quadratic):
    """Until the first cut one device of group a sends updates like those of group b."""

    def __call__(self, device, assignment, round_):
        if device == "dev-90" and not self.rounds.state.tree:
            vector = GOAL["b"] + NOISE[device] - self.theta(assignment.candidates[0])
            return contribution(device, vector, round=round_, model=assignment.candidates[0])
        return super().__call__(device, assignment, round_)


def test_misled_device_comes_to_its_group():
    """A device that the cut misled comes to its group."""
    rounds, answer = ran(6, Misled, **LOOKING)
    assert partition(rounds) != TRUTH
    before = next(c.id for c in rounds.state.clusters.values() if "dev-90" in c.members)
    rounds.step(answer)
    home = next(c for c in rounds.state.clusters.values() if "dev-33" in c.members)
    assert [dict(e.detail) for e in rounds.events if e.kind == "moved"] == [
        {"device": "dev-90", "from": before, "cluster": home.id}
    ]
    expected = GOAL["a"] + np.mean([NOISE[d] for d in GROUPS["a"]], axis=0)
    np.testing.assert_allclose(rounds.theta(home.slot), expected, atol=1e-5, err_msg="its update counts at once")
    rounds.go(answer, 20)
    assert partition(rounds) == TRUTH


def test_without_looks_devices_stay():
    """Alg. 5 alone knows no way back, and it is what `validate=off` gives."""
    assert (CflSettings(validate=False).look_rounds, CflSettings().look_rounds) == (0, 20)
    rounds, _ = ran(30, Misled, **ALG_5)
    assert not [e for e in rounds.events if e.kind == "moved"]
    assert partition(rounds) != TRUTH


def test_models_are_offered_in_looks_only():
    """Models are offered only in rounds of a look, and sealed before: devices hold the model of their own leaf only."""
    rounds, answer = ran(8, **LOOKING)
    leaves = frozenset(rounds.state.clusters)
    assert len(leaves) > 1
    assert [seal_at(rounds, r) for r in (12, 13, 14, 15)] == [frozenset(), leaves, frozenset(), frozenset()]
    rounds.go(answer, 7)
    asked = {r: {len(o.candidates) for r_, _, o in answer.assignments if r_ == r} for r in range(1, 16)}
    assert {r for r, counts in asked.items() if counts != {1}} == {7, 14}
    assert asked[14] == {4}
    assert all(o.candidates[0] in rounds.state.clusters for r, _, o in answer.assignments if r == 14)


def test_one_cluster_has_nothing_to_offer():
    assert not look_due(CflState({0: Cluster(0, DEVICES, ClusterModel())}), CflSettings(look_every=1), 5)


def test_check_waits_for_the_look():
    """A check of a split waits for the look to pass."""
    _, answer = ran(24, **{**ALG_5, "merge_every": 5, "look_every": 5})
    scored = {r for r, _, o in answer.assignments if o.phase == Phase.SCORE}
    assert scored
    assert not any(r % 5 == 0 for r in scored)


def chain(leaves):
    """Return a state whose tree cuts off one leaf after the other: 1, 2, 3, ... of 100, 101, 102, ..."""
    tree, inner = {}, 100
    for leaf in range(1, leaves - 1):
        tree[inner] = Node(inner, ClusterModel(), (leaf, inner + 1))
        inner += 1
    tree[inner] = Node(inner, ClusterModel(), (leaves - 1, leaves))
    clusters = {i: Cluster(i, tuple(f"dev-{i}{x}" for x in "abc"), ClusterModel()) for i in range(1, leaves + 1)}
    return CflState(clusters, tree=tree)


def test_nearest_leaves_are_offered_first():
    """The nearest leaves of the tree are offered first."""
    found = offers(chain(5), 0)
    assert [found[leaf] for leaf in (1, 3, 4)] == [(1, 2, 3, 4, 5), (3, 4, 5, 2, 1), (4, 5, 3, 2, 1)]
    trial = Trial(2, Half(8, ("dev-2a",), ClusterModel()), Half(9, ("dev-2b",), ClusterModel()), ClusterModel(), {})
    assert offers(dataclasses.replace(chain(4), trials={2: trial}), 0)[4] == (4, 3, 1), "none on trial"


def test_every_leaf_comes_up_in_turn():
    """Every leaf comes up in turn and the nearest always."""
    looks = [offers(chain(9), turn)[2] for turn in range(6)]
    assert all(len(models) == 1 + MOST_OFFERED == len(set(models)) for models in looks)
    assert {models[:3] for models in looks} == {(2, 3, 4)}
    assert {m for models in looks[:3] for m in models[3:]} == {1, 5, 6, 7, 8, 9}


def test_offers_of_many_leaves_are_cheap():
    """Steps up the tree are counted, not seconds."""

    class Counted(dict):
        steps = 0

        def __getitem__(self, key):
            Counted.steps += 1
            return super().__getitem__(key)

    tree = {k: Node(k, ClusterModel(), (2 * k, 2 * k + 1)) for k in range(1, 256)}
    state = CflState({k: Cluster(k, ("a", "b"), ClusterModel()) for k in range(256, 512)}, tree=Counted(tree))
    assert len(offers(state, 0)) == 256
    assert Counted.steps < 3 * 256 * 256


def updates(text, phase=Phase.TRAIN):
    """Return contributions: "1a>2" is device dev-1a, which has trained the model of leaf 2."""
    pairs = [word.split(">") for word in text.split()]
    return [contribution(f"dev-{d}", np.ones(3), round=9, model=int(m), phase=phase) for d, m in pairs]


STAY = "1a>1 1b>1 1c>1 2a>2 2b>2 2c>2 3a>3 3b>3 3c>3"


@pytest.mark.parametrize(
    ("given", "least_side", "moves"),
    [
        ("1a>2 1b>1 1c>1 2a>2 2b>2 2c>2", 2, "1a>2"),
        ("1a>2 1b>1 1c>1 2a>2 2b>2 2c>2", 3, ""),
        ("1a>2 1b>2 1c>1 2a>2 2b>2 2c>2", 2, "1b>2"),
        ("1a>2 1b>1 1c>1 2a>1 2b>2 2c>2", 3, "1a>2 2a>1"),
        ("1a>2 1b>1 1c>1 2a>3 2b>2 2c>2 3a>1 3b>3 3c>3", 3, "1a>2 2a>3 3a>1"),
        ("1a>2 1b>2 1c>2 2a>2 2b>2 2c>2", 3, "1a>2 1b>2 1c>2"),
        ("1a>2 1b>2 2a>2 2b>2 2c>2", 3, "1a>2 1b>2"),
        ("1a>2 1b>1 2a>2 2b>2 2c>2", 3, "1a>2"),
        ("1a>1 1b>1 1c>1 2a>2 2b>2 2c>3", 2, ""),
        ("1a>1 1b>1 1c>1 2a>2 2b>3 2c>3", 1, "2b>3 2c>3"),
        ("1a>3 1b>3 1c>1 2a>3 2b>2 2c>2", 2, "1b>3 2a>3"),
        (STAY, 1, ""),
        ("1a>77 stranger>2", 1, ""),
    ],
    ids=[
        *("one", "none-of-so-few", "not-both", "exchange", "a-round-of-three", "all-of-them", "of-a-dead-leaf"),
        *(
            "one-of-a-dead-leaf",
            "not-into-a-dead-leaf",
            "into-a-leaf-of-one",
            "a-dead-leaf-revives",
            "nobody",
            "nowhere",
        ),
    ],
)
def test_who_may_move(given, least_side, moves):
    """Devices that say nothing in the round are away."""
    state, events = move(chain(3), updates(given), least_side, 9, turn=0)
    assert sorted(f"{e.detail['device'][4:]}>{e.detail['cluster']}" for e in events) == sorted(moves.split())
    for e in events:
        assert e.detail["device"] in state.clusters[e.detail["cluster"]].members
    members = [d for c in state.clusters.values() for d in c.members]
    assert sorted(members) == sorted(d for c in chain(3).clusters.values() for d in c.members)


def test_nobody_moves_by_scoring():
    assert move(chain(3), updates("1a>2 1b>1 1c>1", Phase.SCORE), 1, 9, turn=0)[1] == ()


def test_of_two_one_leaves_later():
    """Of two who can't both leave the other leaves next time."""
    given = updates("1a>2 1b>2 1c>1 2a>2 2b>2 2c>2")
    gone = [move(chain(3), given, 2, 9, turn=turn)[1][0].detail["device"] for turn in range(2)]
    assert gone == ["dev-1b", "dev-1a"]


def test_undrawn_but_heard_of_counts():
    """Devices heard of lately count though they were not drawn."""
    state = dataclasses.replace(chain(3), heard={"dev-1c": 8})
    given = updates("1a>2 1b>1 2a>2 2b>2 2c>2")
    assert len(move(state, given, 2, 9, turn=0)[1]) == 1
    assert len(move(chain(3), given, 2, 9, turn=0)[1]) == 0


def test_hopeless_leaf_lets_devices_out():
    """Two of three have stayed: their leaf stands still, and what they see has become another group's."""
    rounds, answer = ran(10, changes={"min_contributors": 3}, **LOOKING, max_age=5)
    active = [d for d in DEVICES if d != "dev-40"]
    answer.goals |= {"dev-02": GOAL["c"], "dev-71": GOAL["c"]}
    rounds.go(answer, 14, present=active)
    assert frozenset((*GROUPS["c"], "dev-02", "dev-71")) in partition(rounds)


def test_move_that_leaves_one_is_not_made():
    """Members that have been away for long hold no leaf up."""
    rounds, answer = ran(10, changes={"min_contributors": 2}, **LOOKING, max_age=5)
    there = [d for d in DEVICES if d != "dev-40"]
    rounds.go(answer, 8, present=there)
    answer.goals["dev-02"] = GOAL["c"]
    rounds.go(answer, 20, present=there)
    assert not [e for e in rounds.events if e.kind == "moved"]
    leaf = next(c for c in rounds.state.clusters.values() if "dev-71" in c.members)
    assert leaf.slot.version >= rounds.round - 1


def seal_at(rounds, round_, present=DEVICES):
    _, plan = rounds.strategy.plan(rounds.state, round_, tuple(sorted(present)))
    assert plan.seal <= plan.models.keys()
    return plan.seal


def test_nodes_model_comes_before_its_check():
    """The model of a node is asked for before its children are checked."""
    rounds, answer = ran(0, **{**ALG_5, "merge_every": 5})
    while not rounds.state.tree:
        rounds.step(answer)
    rounds.go(answer, 20)
    pairs = [n for n in rounds.state.tree.values() if set(n.children) <= rounds.state.clusters.keys()]
    first = min(pairs, key=lambda n: n.check_at)
    assert first.id in seal_at(rounds, first.check_at - 1)
    assert first.id not in seal_at(rounds, first.check_at - 2)
