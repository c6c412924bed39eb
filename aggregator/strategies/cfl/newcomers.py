"""Placement of devices that join later, or whose update was missing when their cluster was split.

Alg. 4 of the paper compares a newcomer's update with cached ones, which were masked under another key. So a newcomer scores
the models of the leaves below its node instead, as in IFCA, trains the best and becomes a member of that leaf; it waits while
all of these leaves are on trial.
"""

from __future__ import annotations

import dataclasses

from aggregator.strategies.base import ClientUpdate, Event, train_assignment
from aggregator.strategies.cfl.state import ROOT, CflState, Step
from aggregator.strategies.cfl.tree import leaves
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


def assignments(state: CflState, there: set[str]) -> dict[str, Assignment]:
    """Return the assignments of unplaced devices: to train the best model of the leaves below their node."""
    asked = {}
    for device, at in state.unplaced.items():
        if device not in there:
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
