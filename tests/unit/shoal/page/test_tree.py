"""The tree of clusters: steps, flows, and steps that are joined."""

from collections import Counter

import pytest

from shoal.page.history import MOST_STEPS, ClusterTree


def grown(*rounds):
    tree = ClusterTree()
    for number, clusters in enumerate(rounds, 1):
        tree.add(number, clusters)
    return tree.document()


def test_before_the_first_round_it_is_empty():
    tree = ClusterTree()
    assert tree.document() == {"steps": [], "flows": [], "joined": 0}
    assert (tree.clusters, tree.sizes) == ({}, {})


@pytest.mark.parametrize(
    ("rounds", "steps", "flows"),
    [
        ([{"a": 0, "b": 0}, {"b": 0, "a": 0}, {"a": 0, "b": 0}], [(1, 3, [(0, 2)])], []),
        (
            [{"a": 0, "b": 0, "c": 0}, {"a": 1, "b": 1, "c": 2}, {"a": 1, "b": 2, "c": 2}, {"a": 3, "b": 3, "c": 3}],
            [(1, 1, [(0, 3)]), (2, 2, [(1, 2), (2, 1)]), (3, 3, [(1, 1), (2, 2)]), (4, 4, [(3, 3)])],
            [[[0, 1, 2], [0, 2, 1]], [[1, 1, 1], [1, 2, 1], [2, 2, 1]], [[1, 3, 1], [2, 3, 2]]],
        ),
        ([{"a": 0}, {"a": 0, "b": 0}], [(1, 1, [(0, 1)]), (2, 2, [(0, 2)])], [[[0, 0, 1]]]),
    ],
    ids=["rounds without change", "a split, a move and a merge", "a newcomer"],
)
def test_steps_and_flows(rounds, steps, flows):
    found = grown(*rounds)
    assert [(s["first"], s["last"], s["sizes"]) for s in found["steps"]] == steps
    assert found["flows"] == flows


def test_round_without_clusters_is_left_out():
    tree = ClusterTree()
    assert (tree.add(1, {"a": 0}), tree.add(2, {}), tree.add(3, {"a": 0}), tree.add(4, {"a": 1})) == (
        True,
        False,
        False,
        True,
    )
    assert [(s["first"], s["last"]) for s in tree.document()["steps"]] == [(1, 3), (4, 4)]


def test_many_changes_are_joined():
    """Many changes are joined where the fewest devices moved."""
    devices = [f"d{i}" for i in range(10)]
    rounds = [{d: (i < n % 3) + 5 * (n >= 20) for i, d in enumerate(devices)} for n in range(3 * MOST_STEPS)]
    found = grown(*rounds)
    assert len(found["steps"]) == MOST_STEPS
    assert found["joined"] == 2 * MOST_STEPS
    assert any({to for _, to, _ in pair} >= {5} and {a for a, _, _ in pair} >= {0} for pair in found["flows"])


def test_joined_flows_add_up_to_the_sizes():
    """After joining the flows still add up to the sizes."""
    rounds = [{f"d{i}": (i * n) % 4 for i in range(12)} for n in range(1, 60)]
    found = grown(*rounds)
    for before, after, pair in zip(found["steps"], found["steps"][1:], found["flows"], strict=False):
        out, into = Counter(), Counter()
        for a, b, count in pair:
            out[a] += count
            into[b] += count
        assert (dict(out), dict(into)) == (dict(before["sizes"]), dict(after["sizes"]))
    assert (found["steps"][0]["first"], found["steps"][-1]["last"]) == (1, 59)
