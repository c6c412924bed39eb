"""CFL's tree of splits: ways up and down, and the edge that a newcomer follows."""

import dataclasses
import itertools

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel
from aggregator.strategies.cfl.tree import Node, follow, leaves, parents, path
from shoal.errors import IntegrityError, KeyMismatchError
from tests.helpers.plans import KEY_ID, contribution
from tests.helpers.quadratics import D, settled_tree

EDGES = ((contribution("a", np.eye(D)[0]),), (contribution("b", np.eye(D)[1]),))


def node(id_, left, right, edges=EDGES):
    return Node(id_, ClusterModel(), (left, right), edges)


TREE = {0: node(0, 5, 2), 2: node(2, 7, 3), 5: node(5, 9, 6)}
"""Ids in no order: 0 has 5 and 2; 2 has the leaves 7 and 3; 5 has the leaves 9 and 6."""


def test_every_node_and_leaf_but_the_root_has_one_parent():
    assert parents(TREE) == {5: 0, 2: 0, 7: 2, 3: 2, 9: 5, 6: 5}
    assert parents({}) == {}


@pytest.mark.parametrize(("leaf", "way"), [(7, (0, 2, 7)), (6, (0, 5, 6)), (2, (0, 2)), (0, (0,)), (99, (99,))])
def test_the_path_leads_from_the_root_to_the_leaf(leaf, way):
    assert path(TREE, leaf) == way


def test_leaves_are_in_order_and_only_those_below_the_node():
    assert leaves(TREE, 0) == (3, 6, 7, 9)
    assert leaves(TREE, 5) == (6, 9)


def test_an_update_without_a_direction_follows_no_edge_with_an_error():
    """The cosine of a zero vector is 0, and a tie leads to the second child."""
    zero = (contribution("z", np.zeros(D)),)
    assert follow(node(0, 8, 9, (zero, zero)), contribution("new", np.eye(D)[0])) == 9


@pytest.mark.parametrize("edges", [((), EDGES[1]), (EDGES[0], ())])
def test_an_empty_edge_is_refused_by_cluster(edges):
    with pytest.raises(IntegrityError, match=r"^an edge of cluster 4 has no update to compare with$"):
        follow(node(4, 8, 9, edges), contribution("new", np.eye(D)[0]))


def test_a_cached_update_under_another_key_is_refused_by_cluster():
    stranger = contribution("new", np.eye(D)[0], key_id=b"x" * 16)
    assert stranger.key_id != KEY_ID
    with pytest.raises(KeyMismatchError, match=r"^cached updates of cluster 4 are under another mask key$"):
        follow(node(4, 8, 9), stranger)


def test_the_way_down_is_by_the_highest_cosine_not_by_the_mean():
    """Alg. 4, lines 6 and 7: the one most similar cached update decides, however its neighbours point."""
    close, far, middling = (np.zeros(D) for _ in range(3))
    close[0], far[1], middling[:2] = 1.0, 1.0, (0.8, 0.6)
    edges = (
        (contribution("dev-01", close), contribution("dev-02", -close), contribution("dev-03", far)),
        (contribution("dev-04", middling), contribution("dev-05", middling)),
    )
    made = node(0, 8, 9, edges)
    assert follow(made, contribution("new", 5 * close)) == 8
    assert follow(made, contribution("new", -3 * middling)) == 8
    assert follow(made, contribution("new", middling)) == 9
    assert follow(made, contribution("new", np.zeros(D))) == 9, "a tie goes to the second, as in Alg. 4"


def test_cosines_between_long_updates_are_summed_by_blocks():
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 200_001)).astype(np.float32)
    made = node(0, 1, 2, ((contribution("x", b),), (contribution("y", -b),)))
    expected = np.dot(a.astype(np.float64), b) / np.linalg.norm(a.astype(np.float64)) / np.linalg.norm(b)
    assert follow(made, contribution("new", a)) == (1 if expected > 0 else 2)


@pytest.mark.parametrize("edge", [0, 1])
def test_one_cached_update_under_another_key_stops_the_comparison(edge):
    edges = list(EDGES)
    edges[edge] = (*edges[edge], dataclasses.replace(edges[edge][0], key_id=b"o" * 16))
    with pytest.raises(KeyMismatchError, match="another mask key"):
        follow(node(0, 1, 2, tuple(edges)), contribution("dev-99", np.ones(D)))


def test_the_path_names_every_model_from_general_to_special():
    rounds = settled_tree()
    for cluster in rounds.state.clusters.values():
        way = path(rounds.state.tree, cluster.id)
        assert (way[0], way[-1]) == (0, cluster.id)
        for above, child in itertools.pairwise(way):
            assert child in rounds.state.tree[above].children


def test_the_leaves_of_a_grown_tree_are_its_clusters():
    rounds = settled_tree()
    tree = rounds.state.tree
    assert leaves(tree, 0) == tuple(sorted(rounds.state.clusters))
    for split in tree.values():
        below = [leaf for leaf in rounds.state.clusters if split.id in path(tree, leaf)]
        assert leaves(tree, split.id) == tuple(sorted(below))
