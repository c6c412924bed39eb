"""What CFL takes into the next mask epoch.

Every model lives on: clusters', the tree nodes', those of halves on trial. Of single updates only those that the tree
keeps on its edges, or would keep if a trial ends well, and of these the ones whose devices mask them anew. Updates from
before are compared with none from after, so that the members' newest updates are forgotten: cuts wait for new ones.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from aggregator.strategies.base import ClientUpdate
from aggregator.strategies.cfl.state import CflState
from aggregator.strategies.renewal import Inherited, Renewal, fresh_slot, retained
from shoal.errors import KeyMismatchError
from shoal.protocol.messages import Assignment

Row = tuple[ClientUpdate, ...]


def inherited(state: CflState) -> Inherited:
    """Return all models by their ids, and the updates of edges and trials."""
    slots = {c.id: c.slot for c in state.clusters.values()} | {n.id: n.slot for n in state.tree.values()}
    slots |= {h.model: h.slot for t in state.trials.values() for h in (t.left, t.right)}
    return Inherited(slots, own={c.key: c for c in _cached(state)})


def renewed(state: CflState, renewal: Renewal, key_id: bytes) -> CflState:
    """Return the state in the next mask epoch.

    An edge may lose updates, also all of them: newcomers.py then places by loss.

    Args:
        state: as `inherited` took it.
        renewal: what has come through.
        key_id: the next epoch's.

    Raises:
        KeyMismatchError: an update came masked under another key.
    """
    for update in renewal.own.values():
        if update.key_id != key_id:
            raise KeyMismatchError(f"{update.device} masked its update of round {update.round} under another key")

    def known(row: Row) -> Row:
        return tuple(renewal.own[c.key] for c in row if c.key in renewal.own)

    clusters = {k: dataclasses.replace(c, slot=fresh_slot(renewal, c.id)) for k, c in state.clusters.items()}
    tree = {
        k: dataclasses.replace(n, slot=fresh_slot(renewal, n.id), edges=(known(n.edges[0]), known(n.edges[1])))
        for k, n in state.tree.items()
    }
    trials = {}
    for cluster, trial in state.trials.items():
        left, right = (dataclasses.replace(h, slot=fresh_slot(renewal, h.model)) for h in (trial.left, trial.right))
        trials[cluster] = dataclasses.replace(trial, left=left, right=right, evidence=known(trial.evidence))
    return dataclasses.replace(state, clusters=clusters, tree=tree, trials=trials, newest={}, gathered={})


def retain(state: CflState, active: frozenset[str]) -> CflState:
    """Return the state without devices that are not ``active``; what they brought has not come through the rollover."""

    def left(members: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(d for d in members if d in active)

    clusters = {k: dataclasses.replace(c, members=left(c.members)) for k, c in state.clusters.items()}
    trials = {}
    for cluster, trial in state.trials.items():
        halves = (dataclasses.replace(h, members=left(h.members)) for h in (trial.left, trial.right))
        trials[cluster] = dataclasses.replace(trial, left=next(halves), right=next(halves))
    return dataclasses.replace(state, clusters=clusters, trials=trials, unplaced=retained(state.unplaced, active))


def keeping(state: CflState, assignments: Mapping[str, Assignment]) -> dict[str, Assignment]:
    """Return the orders that tell devices to keep what they will have to mask anew.

    A device's latest update among those of edges and trials is named in each of its orders, so that whoever was away
    when it became one hears of it too; what it was told to keep before it keeps.
    """
    latest: dict[str, int] = {}
    for update in _cached(state):
        latest[update.device] = max(update.round, latest.get(update.device, 0))
    return {d: dataclasses.replace(assignment, keep=latest.get(d, 0)) for d, assignment in assignments.items()}


def _cached(state: CflState) -> Iterator[ClientUpdate]:
    for node in state.tree.values():
        for edge in node.edges:
            yield from edge
    for trial in state.trials.values():
        yield from trial.evidence
