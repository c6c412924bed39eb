"""Devices that change clusters: IFCA's identity step among the leaves of CFL.

A cut can be right but for one device, a newcomer can follow the wrong edge, and what a device sees may change; Alg. 5 and
Alg. 4 know no way back. So every ``look_every`` rounds each device is offered the other leaves' models beside its own. It
trains the one of least training loss (ifca Alg. 1, line 7) and belongs to that leaf from then on. Its own leaf's model was
fitted to its training data too, so that chance does not move it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Final

from aggregator.strategies.base import Contribution, Event
from aggregator.strategies.cfl_state import CflSettings, CflState, Step
from aggregator.strategies.cfl_tree import Node, Tree, leaves, path
from wire.messages import Phase

MOST_OFFERED: Final = 16
"""Models beside its own that a device is offered at once: it fetches and scores each."""


def look_due(state: CflState, settings: CflSettings, round_: int) -> bool:
    """Whether devices are offered other leaves' models in round ``round_``."""
    return settings.look_rounds > 0 and round_ % settings.look_rounds == 0 and len(state.clusters) > 1


def offered(state: CflState, leaf: int) -> tuple[int, ...]:
    """Return the models offered to the members of ``leaf``: its own, then the nearest leaves of the tree.

    Those on trial have no model of their own to offer.
    """
    own = path(state.tree, leaf)

    def distance(other: int) -> tuple[int, int]:
        above = path(state.tree, other)
        common = sum(a == b for a, b in zip(own, above, strict=False))
        return len(own) + len(above) - 2 * common, other

    others = sorted((c for c in state.clusters if c != leaf and c not in state.trials), key=distance)
    return (leaf, *others[:MOST_OFFERED])


def move(state: CflState, given: Collection[Contribution], least_side: int, round_: int) -> Step:
    """Make whoever has trained another leaf's model its member, before the leaf is averaged: its update counts.

    Nobody leaves a cluster that would have fewer than ``least_side`` devices without it; such an update counts nowhere.
    """
    own = {d: c.id for c in state.clusters.values() for d in c.members}
    events = []
    for update in given:
        device, leaf, before = update.device, update.model, own.get(update.device)
        if update.phase is not Phase.TRAIN or before is None or before == leaf or leaf not in state.clusters:
            continue
        old, new = state.clusters[before], state.clusters[leaf]
        if len(old.members) <= least_side:
            continue
        old = dataclasses.replace(old, members=tuple(d for d in old.members if d != device))
        new = dataclasses.replace(new, members=(*new.members, device))
        tree = {node.id: _led_right(state.tree, node, device, leaf) for node in state.tree.values()}
        state = dataclasses.replace(state, clusters={**state.clusters, before: old, leaf: new}, tree=tree)
        events.append(Event(round_, "moved", {"device": device, "from": before, "cluster": leaf}))
    return state, tuple(events)


def _led_right(tree: Tree, node: Node, device: str, leaf: int) -> Node:
    """Return ``node`` without the updates of ``device`` on edges that do not lead to ``leaf``: they would mislead newcomers.

    An edge keeps its last updates, because one without any places nobody by similarity.
    """
    edges = []
    for child, edge in zip(node.children, node.edges, strict=True):
        below = leaves(tree, child) if child in tree else (child,)
        kept = edge if leaf in below else tuple(c for c in edge if c.device != device)
        edges.append(kept or edge)
    return dataclasses.replace(node, edges=(edges[0], edges[1]))
