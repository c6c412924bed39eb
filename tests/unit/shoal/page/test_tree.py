"""The tree of clusters: steps, flows, and steps that are joined."""

from collections import Counter

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


def test_rounds_without_change_are_one_step():
    found = grown({"a": 0, "b": 0}, {"b": 0, "a": 0}, {"a": 0, "b": 0})
    assert found["steps"] == [{"first": 1, "last": 3, "sizes": [(0, 2)]}]
    assert found["flows"] == []


def test_split_a_merge_and_a_move_are_flows():
    found = grown(
        {"a": 0, "b": 0, "c": 0}, {"a": 1, "b": 1, "c": 2}, {"a": 1, "b": 2, "c": 2}, {"a": 3, "b": 3, "c": 3}
    )
    assert found["flows"] == [[[0, 1, 2], [0, 2, 1]], [[1, 1, 1], [1, 2, 1], [2, 2, 1]], [[1, 3, 1], [2, 3, 2]]]


def test_newcomer_is_in_size_and_in_no_flow():
    found = grown({"a": 0}, {"a": 0, "b": 0})
    assert [s["sizes"] for s in found["steps"]] == [[(0, 1)], [(0, 2)]]
    assert found["flows"] == [[[0, 0, 1]]]


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
