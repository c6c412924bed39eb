"""Devices that change clusters in CFL: whom a cut misled, and whose data have changed."""

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel
from aggregator.strategies.cfl.reassignment import move, offers
from aggregator.strategies.cfl.state import CflSettings, CflState, Cluster
from aggregator.strategies.cfl.tree import Node
from shoal.errors import ConfigError
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
    cfl,
    partition,
    run_until_quiet,
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
    rounds = cfl(**LOOKING)
    answer = Misled(rounds)
    for _ in range(6):
        rounds.step(answer)
    assert partition(rounds) != TRUTH
    before = next(c.id for c in rounds.state.clusters.values() if "dev-90" in c.members)
    rounds.step(answer)
    home = next(c.id for c in rounds.state.clusters.values() if "dev-33" in c.members)
    assert [dict(e.detail) for e in rounds.events if e.kind == "moved"] == [
        {"device": "dev-90", "from": before, "cluster": home}
    ]
    run_until_quiet(rounds, answer, most=20)
    assert partition(rounds) == TRUTH


def test_update_counts_in_its_new_cluster():
    """Its update counts in its new cluster in the same round."""
    rounds = cfl(**LOOKING)
    answer = Misled(rounds)
    for _ in range(7):
        rounds.step(answer)
    home = next(c for c in rounds.state.clusters.values() if "dev-33" in c.members)
    expected = GOAL["a"] + np.mean([NOISE[d] for d in GROUPS["a"]], axis=0)
    np.testing.assert_allclose(rounds.theta(home.slot), expected, atol=1e-5)


def test_changed_data_change_the_cluster():
    """A device whose data have changed changes clusters."""
    rounds = cfl(**LOOKING)
    answer = Quadratic(rounds)
    run_until_quiet(rounds, answer, most=14)
    assert partition(rounds) == TRUTH
    answer.goals["dev-40"] = GOAL["c"]
    for _ in range(7):
        rounds.step(answer)
    assert {frozenset((*GROUPS["c"], "dev-40")), frozenset(("dev-02", "dev-71"))} <= partition(rounds)


def test_without_looks_devices_stay():
    """Alg. 5 alone knows no way back, and it is what `validate=off` gives."""
    assert CflSettings(validate=False).look_rounds == 0
    assert CflSettings().look_rounds == 20
    rounds = cfl(**ALG_5)
    run_until_quiet(rounds, Misled(rounds), most=30)
    assert not [e for e in rounds.events if e.kind == "moved"]
    assert partition(rounds) != TRUTH


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
    assert found[4] == (4, 5, 3, 2, 1)
    assert found[1] == (1, 2, 3, 4, 5)
    assert found[3] == (3, 4, 5, 2, 1)


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


def test_of_two_one_leaves_later():
    """Of two who can't both leave the other leaves next time."""
    given = updates("1a>2 1b>2 1c>1 2a>2 2b>2 2c>2")
    gone = [move(chain(3), given, 2, 9, turn=turn)[1][0].detail["device"] for turn in range(2)]
    assert gone == ["dev-1b", "dev-1a"]


@pytest.mark.parametrize("value", [-2, 1])
def test_a_look_in_every_round_is_refused(value):
    with pytest.raises(ConfigError, match="look_every"):
        cfl(look_every=value)


def test_hopeless_leaf_lets_devices_out():
    """Two of three have stayed: their leaf stands still, and what they see has become another group's."""
    rounds = cfl(changes={"min_contributors": 3}, **LOOKING, max_age=5)
    answer = Quadratic(rounds)
    run_until_quiet(rounds, answer, most=10)
    active = [d for d in DEVICES if d != "dev-40"]
    answer.goals |= {"dev-02": GOAL["c"], "dev-71": GOAL["c"]}
    for _ in range(14):
        rounds.step(answer, present=active)
    assert frozenset((*GROUPS["c"], "dev-02", "dev-71")) in partition(rounds)


def test_move_that_leaves_one_is_not_made():
    """Members that have been away for long hold no leaf up."""
    rounds = cfl(changes={"min_contributors": 2}, **LOOKING, max_age=5)
    answer = Quadratic(rounds)
    run_until_quiet(rounds, answer, most=10)
    there = [d for d in DEVICES if d != "dev-40"]
    for _ in range(8):
        rounds.step(answer, present=there)
    answer.goals["dev-02"] = GOAL["c"]
    for _ in range(20):
        rounds.step(answer, present=there)
    assert not [e for e in rounds.events if e.kind == "moved"]
    leaf = next(c for c in rounds.state.clusters.values() if "dev-71" in c.members)
    assert leaf.slot.version >= rounds.round - 1
