"""Devices that come later, or whose update was missing when their cluster was cut: Alg. 4 of the CFL paper."""

from __future__ import annotations

import dataclasses

from aggregator.strategies.base import Contribution, Event
from aggregator.strategies.cfl_state import ROOT, CflState, Step
from aggregator.strategies.cfl_tree import follow


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


def place(state: CflState, given: list[Contribution], round_: int) -> Step:
    """Each newcomer goes one edge down (lines 3 to 13); at a leaf it becomes a member, after a trial if there is one."""
    events = []
    for update in given:
        at = state.unplaced.get(update.device)
        if at is None or update.model != at or update.vector is None:
            continue
        child = follow(state.tree[at], update)
        if child in state.tree:
            state = dataclasses.replace(state, unplaced={**state.unplaced, update.device: child})
        elif child not in state.trials:
            leaf = state.clusters[child]
            leaf = dataclasses.replace(leaf, members=(*leaf.members, update.device))
            unplaced = {d: n for d, n in state.unplaced.items() if d != update.device}
            state = dataclasses.replace(state, unplaced=unplaced, clusters={**state.clusters, child: leaf})
            events.append(Event(round_, "newcomer", {"device": update.device, "cluster": child}))
    return state, tuple(events)
