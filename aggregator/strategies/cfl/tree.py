"""CFL's parameter tree (section V-C): the history of splits, by which newcomers find their cluster (Alg. 4).

A node is a cluster that was split: its model at the stationary point, its two children, and for each edge the masked
updates that the child's devices had sent just before the split. A newcomer trains the node's model and follows the
edge that holds the most similar update, down to a leaf. A rollover of the mask may empty an edge (renewal.py):
then newcomers at that node are placed by loss instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np

from aggregator.strategies.base import ClientUpdate, ClusterModel, norm_of
from shoal.errors import IntegrityError, KeyMismatchError

_BLOCK: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Node:
    """A split cluster.

    Attributes:
        id: the cluster's id, which is also its model's.
        slot: its model when it was split.
        children: ids of the two clusters it became.
        edges: for each child, the pre-split masked updates of the devices that were its own then (Eq. 47), but for those
            that a rollover has lost; each carries its key_id.
        check_at: round from which it is asked again whether the cut pays; strikes: times in a row that it did not.
    """

    id: int
    slot: ClusterModel
    children: tuple[int, int]
    edges: tuple[tuple[ClientUpdate, ...], tuple[ClientUpdate, ...]]
    check_at: int = 0
    strikes: int = 0


Tree = Mapping[int, Node]


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


def follow(node: Node, update: ClientUpdate) -> int:
    """Return the child whose cached updates hold the one most similar to a newcomer's ``update`` (Alg. 4, lines 6 to 10).

    Raises:
        IntegrityError: an edge is empty.
        KeyMismatchError: the cached updates are masked under another key.
    """
    best = []
    for edge in node.edges:
        if not edge:
            raise IntegrityError(f"an edge of cluster {node.id} has no update to compare with")
        if any(c.key_id != update.key_id for c in edge):
            raise KeyMismatchError(f"cached updates of cluster {node.id} are under another mask key")
        best.append(max(_cosine(update, c) for c in edge))
    return node.children[0] if best[0] > best[1] else node.children[1]


def _cosine(a: ClientUpdate, b: ClientUpdate) -> float:
    """The cosine of two updates, accumulated in float64 by blocks; 0 where one is zero."""
    total = 0.0
    for start in range(0, len(a.row), _BLOCK):
        total += float(np.dot(a.row[start : start + _BLOCK], b.row[start : start + _BLOCK]))
    scale = norm_of(a.row) * norm_of(b.row)
    return total / scale if scale > 0.0 else 0.0
