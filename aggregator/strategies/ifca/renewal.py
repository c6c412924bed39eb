"""What IFCA takes into the next mask epoch.

Model ids are origin numbers, and after a rollover they are again: once one start is kept, its k models become origins 0
to k - 1. While restarts are under way every start lives on, so that each keeps its numbers: the current one, the best
finished one, and the others, which are at their origins (again, where they have lost).

With weight sharing a rollover folds one shared segment into all models, so that no two starts can go through it. Where
one comes before the restarts are over they end with it: the best finished start is kept, or if there is none the one
under way. The owner can plan epochs so that only a revocation does this (`checked_settings`).
"""

from __future__ import annotations

import dataclasses

from aggregator.strategies.base import ClusterModel, Event
from aggregator.strategies.ifca.state import IfcaState
from aggregator.strategies.renewal import Inherited, Renewal, fresh_slot, retained


def inherited(state: IfcaState, starts: int) -> Inherited:
    """Return the models that outlive the mask epoch.

    Args:
        state: between rounds.
        starts: how many models all starts have together.
    """
    state = _one_start(state)
    models = {s.origin: s for s in (*state.best, *state.slots)}
    if not state.settled:
        models = {i: ClusterModel(origin=i) for i in range(starts)} | models
    return Inherited(models, shared=state.shared)


def renewed(state: IfcaState, renewal: Renewal) -> IfcaState:
    """Return the state in the next mask epoch; identities, and what is known of their stability, stay."""
    kept = _one_start(state)
    slots = tuple(fresh_slot(renewal, s.origin) for s in kept.slots)
    news = state.news
    if kept.settled and not state.settled:
        news += (Event(renewal.round, "restarts-ended", {"start": kept.start, "finished": bool(state.best)}),)
    return dataclasses.replace(
        kept,
        slots=slots,
        shared=None if kept.shared is None else slots[0],
        best=tuple(fresh_slot(renewal, s.origin) for s in kept.best),
        news=news,
        gathered={},
    )


def retain(state: IfcaState, active: frozenset[str]) -> IfcaState:
    """Return the state without devices that are not ``active``."""
    return dataclasses.replace(
        state,
        devices=tuple(d for d in state.devices if d in active),
        choice=retained(state.choice, active),
        best_choice=retained(state.best_choice, active),
        broadcast=dataclasses.replace(state.broadcast, confirmed=state.broadcast.confirmed & active),
    )


def _one_start(state: IfcaState) -> IfcaState:
    """Return the state with one start only where weight sharing is on: the best finished one, else the one under way."""
    if state.settled or state.shared is None:
        return state
    if state.best:
        return dataclasses.replace(state.settle(), best_loss=None, best_choice={})
    return dataclasses.replace(state, settled=True)
