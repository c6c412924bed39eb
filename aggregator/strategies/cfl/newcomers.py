"""Placement of devices that join later, or whose update was missing when their cluster was split (cfl Alg. 4).

A newcomer walks down the tree, one edge a round. At a node it trains the model theta* that the cut was made at, and follows the
edge whose direction has the highest cosine with its update. The paper compares it with the cached updates of each edge, but
these were masked under another key; the direction is their mean (tree.py), and the newcomer itself compares. At a leaf it
becomes a member, after a trial if there is one.

If no device can hand over the models to compare with, or an edge has no direction, the newcomer scores the models of the leaves
below its node instead, as in IFCA, trains the best and becomes a member of that leaf; it waits while all of these leaves are on
trial.
"""

from __future__ import annotations

import dataclasses

from aggregator.strategies.base import ClientUpdate, Event, place_assignment, train_assignment
from aggregator.strategies.cfl.state import ROOT, CflState, Step
from aggregator.strategies.cfl.tree import EDGES, leaves
from shoal.protocol.messages import Assignment, Phase


def welcome(state: CflState, there: set[str]) -> CflState:
    """Devices that no cluster knows join the only cluster, unless that is on trial, or start at the root of the tree."""
    known = {d for c in state.clusters.values() for d in c.members} | set(state.unplaced)
    new = sorted(there - known)
    if not new:
        return state
    if state.tree:
        return dataclasses.replace(state, unplaced={**state.unplaced, **dict.fromkeys(new, ROOT)})
    if ROOT in state.trials:
        return state
    root = state.clusters[ROOT]
    whole = dataclasses.replace(root, members=(*root.members, *new))
    return dataclasses.replace(state, clusters={**state.clusters, ROOT: whole})


def assignments(state: CflState, there: set[str], *, by_loss: bool = False) -> dict[str, Assignment]:
    """Return the assignments of unplaced devices: to choose an edge of their node by direction, or a leaf below it by loss.

    Args:
        state: with the newcomers.
        there: the available devices.
        by_loss: choose a leaf, though the edges have directions.
    """
    asked = {}
    for device, at in state.unplaced.items():
        if device not in there:
            continue
        if not by_loss and state.tree[at].compared:
            base, *ends = state.tree[at].compared
            asked[device] = place_assignment(base, tuple(sorted(ends)))
            continue
        candidates = tuple(leaf for leaf in leaves(state.tree, at) if leaf not in state.trials)
        if candidates:
            asked[device] = train_assignment(candidates, evaluate=False)
    return asked


def join(state: CflState, given: list[ClientUpdate], round_: int) -> Step:
    """Make devices that chose a leaf by loss its members. Called before the leaf is averaged, so their updates count."""
    chosen: dict[str, int] = {}
    for update in given:
        if update.device in state.unplaced and update.phase is Phase.TRAIN and update.model in state.clusters:
            chosen[update.device] = update.model
    if not chosen:
        return state, ()
    clusters = dict(state.clusters)
    for leaf in dict.fromkeys(chosen.values()):
        new = tuple(d for d, at in chosen.items() if at == leaf)
        clusters[leaf] = dataclasses.replace(clusters[leaf], members=(*clusters[leaf].members, *new))
    unplaced = {d: n for d, n in state.unplaced.items() if d not in chosen}
    events = (Event(round_, "newcomer", {"device": d, "cluster": at, "by": "loss"}) for d, at in chosen.items())
    return dataclasses.replace(state, clusters=clusters, unplaced=unplaced), tuple(events)


def place(state: CflState, given: list[ClientUpdate], round_: int) -> Step:
    """Move each newcomer that has chosen an edge down along it (lines 3 to 13); at a leaf it becomes a member."""
    events = []
    for update in given:
        at = state.unplaced.get(update.device)
        if at is None or update.phase is not Phase.PLACE:
            continue
        child = update.nearest - EDGES
        if child in state.tree:
            state = dataclasses.replace(state, unplaced={**state.unplaced, update.device: child})
        elif child in state.clusters and child not in state.trials:  # a late merge may just have undone the edge
            state = _with_member(state, child, update.device)
            detail = {"device": update.device, "cluster": child, "by": "direction"}
            events.append(Event(round_, "newcomer", detail))
    return state, tuple(events)


def _with_member(state: CflState, leaf: int, device: str) -> CflState:
    cluster = state.clusters[leaf]
    cluster = dataclasses.replace(cluster, members=(*cluster.members, device))
    unplaced = {d: n for d, n in state.unplaced.items() if d != device}
    return dataclasses.replace(state, unplaced=unplaced, clusters={**state.clusters, leaf: cluster})
