"""CFL's parameter tree (section V-C): the history of splits.

A node is a cluster that was split: its model at the stationary point, and its two children. The models on the path from the
root to a leaf go from general to special. The paper stores on each edge the updates of the devices below it as well. Here an
edge has a direction, the mean of these updates, as the difference of two models that devices hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from aggregator.strategies.base import ClusterModel
from shoal import limits

BASES: Final = limits.MAX_MODELS // 4
"""Plus a node's id: the model id of the model from which the directions of its edges lead. Clusters have smaller ids."""
EDGES: Final = limits.MAX_MODELS // 2
"""Plus a child's id: the model id of the model to which the direction of the edge above it leads."""


@dataclass(frozen=True, slots=True)
class Node:
    """A split cluster.

    Attributes:
        id: the cluster's id, which is also its model's.
        slot: its model when it was split.
        children: ids of the two clusters it became.
        check_at: round from which it is asked again whether the cut pays; strikes: times in a row that it did not.
        edges: theta*, from which both sides of the cut trained first, and for each child theta* plus the mean update of its
            side; none without both means.
    """

    id: int
    slot: ClusterModel
    children: tuple[int, int]
    check_at: int = 0
    strikes: int = 0
    edges: tuple[ClusterModel, ...] = ()

    @property
    def compared(self) -> dict[int, ClusterModel]:
        """Return the models that a newcomer needs to choose one of the edges, by id, the base first; none if it can't."""
        if not self.edges or max(self.id, *self.children) >= BASES:
            return {}
        base, *ends = self.edges
        return {BASES + self.id: base, **{EDGES + c: end for c, end in zip(self.children, ends, strict=True)}}


Tree = Mapping[int, Node]


def grown(root: int, origins: int, check_at: int) -> tuple[Tree, dict[int, ClusterModel]]:
    """Return a tree for a run that begins with the models of several clusters: nodes by id, and each leaf's model.

    Neighbours among the origins, which were split last, are siblings. The model of a node is the mean of those below it.

    Args:
        root: the root's id; the others follow it.
        origins: number of models, at least two.
        check_at: see `Node`.
    """
    tree: dict[int, Node] = {}
    models: dict[int, ClusterModel] = {}
    parts = [tuple(range(origins))]
    for id_, part in enumerate(parts, root):  # which grows meanwhile
        first, *others = part
        share = 1 / len(part)
        mean = ClusterModel(first, scale=share, others=tuple((share, other) for other in others))
        if not others:
            models[id_] = mean
            continue
        next_id = root + len(parts)
        tree[id_] = Node(id_, mean, (next_id, next_id + 1), check_at)
        half = len(part) // 2
        parts += [part[:half], part[half:]]
    return tree, models


def parents(tree: Tree) -> dict[int, int]:
    """Return the id of the node above each node and leaf but the root."""
    return {child: node.id for node in tree.values() for child in node.children}


def path(tree: Tree, leaf: int) -> tuple[int, ...]:
    """Return the ids from the root to ``leaf``: the models a device of that cluster may use, general to special."""
    parent = parents(tree)
    ids = [leaf]
    while ids[-1] in parent:
        ids.append(parent[ids[-1]])
    return tuple(reversed(ids))


def leaves(tree: Tree, root: int) -> tuple[int, ...]:
    """Return the ids of the leaves below node ``root``, in order."""
    below: list[int] = []
    for child in tree[root].children:
        below += leaves(tree, child) if child in tree else (child,)
    return tuple(sorted(below))
