"""CFL's tree of splits: ways up and down."""

import itertools

import pytest

from aggregator.strategies.base import ClusterModel
from aggregator.strategies.cfl.tree import Node, grown, leaves, parents, path
from tests.unit.aggregator.strategies.cfl.quadratics import settled_tree


def node(id_, left, right):
    return Node(id_, ClusterModel(), (left, right))


TREE = {0: node(0, 5, 2), 2: node(2, 7, 3), 5: node(5, 9, 6)}


def test_every_node_has_one_parent():
    """Every node and leaf but the root has one parent."""
    assert parents(TREE) == {5: 0, 2: 0, 7: 2, 3: 2, 9: 5, 6: 5}
    assert parents({}) == {}


@pytest.mark.parametrize(("leaf", "way"), [(7, (0, 2, 7)), (6, (0, 5, 6)), (2, (0, 2)), (0, (0,)), (99, (99,))])
def test_path_leads_from_root_to_the_leaf(leaf, way):
    assert path(TREE, leaf) == way


def test_leaves_are_in_order():
    """Leaves are in order and only those below the node."""
    assert leaves(TREE, 0) == (3, 6, 7, 9)
    assert leaves(TREE, 5) == (6, 9)


def test_ways_of_a_grown_tree():
    """The path names every model from general to special, and the leaves are the clusters."""
    rounds = settled_tree()
    tree, clusters = rounds.state.tree, rounds.state.clusters
    for cluster in clusters:
        way = path(tree, cluster)
        assert (way[0], way[-1]) == (0, cluster)
        for above, child in itertools.pairwise(way):
            assert child in tree[above].children
    for split in tree.values():
        assert leaves(tree, split.id) == tuple(sorted(leaf for leaf in clusters if split.id in path(tree, leaf)))


@pytest.mark.parametrize("count", [2, 3, 5, 8])
def test_a_tree_grows_above_given_models(count):
    """Each model is a leaf, neighbours are siblings, and a node's model is the mean of those below it."""
    tree, models = grown(0, count, 20)
    assert sorted((*tree, *models)) == list(range(2 * count - 1))
    assert leaves(tree, 0) == tuple(sorted(models))
    assert sorted(model.origin for model in models.values()) == list(range(count))
    for found in tree.values():
        below = [models[leaf].origin for leaf in leaves(tree, found.id)]
        shares = {found.slot.origin: found.slot.scale, **{at: share for share, at in found.slot.others}}
        assert shares == pytest.approx(dict.fromkeys(below, 1 / len(below)))
        assert max(below) - min(below) == len(below) - 1
