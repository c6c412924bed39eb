"""CFL's change to a new mask epoch.

All models are folded: those of clusters, of the tree's nodes and of halves on trial. Of single updates only those on the
tree's edges and those of trials can continue, if their devices mask them under the new key. Updates of different mask epochs
can't be compared, so the members' newest updates are dropped and splits wait for new ones.
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

    An edge may lose some or all of its updates; newcomers.py places devices by loss if it has none.

    Args:
        state: as `inherited` took it.
        renewal: the result of the rollover.
        key_id: the next epoch's.

    Raises:
        KeyMismatchError: an update is masked under another key.
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


def without_updates(state: CflState) -> CflState:
    """Return the state without any client update, as round keys need it: no later update can be compared with them.

    It still records when each device sent its newest one. Newcomers are placed by loss.
    """
    newest = {d: dataclasses.replace(c, vector=None, attached=b"", statement=b"") for d, c in state.newest.items()}
    tree = {k: dataclasses.replace(n, edges=((), ())) for k, n in state.tree.items()}
    trials = {k: dataclasses.replace(t, evidence=()) for k, t in state.trials.items()}
    return dataclasses.replace(state, newest=newest, tree=tree, trials=trials)


def retain(state: CflState, active: frozenset[str]) -> CflState:
    """Return the state without devices that are not ``active``; `renewed` has dropped their updates."""

    def left(members: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(d for d in members if d in active)

    clusters = {k: dataclasses.replace(c, members=left(c.members)) for k, c in state.clusters.items()}
    trials = {}
    for cluster, trial in state.trials.items():
        halves = (dataclasses.replace(h, members=left(h.members)) for h in (trial.left, trial.right))
        trials[cluster] = dataclasses.replace(trial, left=next(halves), right=next(halves))
    return dataclasses.replace(state, clusters=clusters, trials=trials, unplaced=retained(state.unplaced, active))


def keeping(state: CflState, assignments: Mapping[str, Assignment]) -> dict[str, Assignment]:
    """Return the assignments with the round of the update that each device must store to mask it again at a rollover.

    Each assignment names the device's latest update on an edge or in a trial, so that a device that was offline when the
    update got there learns of it too. A device goes on storing the updates named before.
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
