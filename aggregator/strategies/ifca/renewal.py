"""IFCA's change to a new mask epoch.

Model ids are origin numbers before and after a rollover: once one start is chosen, its k models become origins 0 to k - 1.
During restarts the models of every start are folded, so that their numbers stay: the current start, the best finished one,
and the others, which are at their origins (the finished ones that lost are reset to them).

With weight sharing a rollover folds one shared segment into all models, so only one start can continue. A rollover during
restarts therefore ends them: the best finished start is chosen, or the current one if none is finished. The owner can plan
epochs so that only a revocation causes this (`checked_settings`).
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
        starts: number of models of all starts together.
    """
    state = _one_start(state)
    first_best = state.best_start * len(state.best)
    models = dict(enumerate(state.best, first_best)) | dict(enumerate(state.slots, state.first))
    if not state.settled:
        models = {i: ClusterModel(origin=i) for i in range(starts)} | models
    return Inherited(models, shared=state.shared)


def moving(state: IfcaState) -> Inherited:
    """Return the models that may have moved in the round that has just closed, under round keys.

    The shared segment of a start that has just ended moved as that of the best start, if it is.
    """
    models = dict(enumerate(state.best, state.best_start * len(state.best)))
    models |= dict(enumerate(state.slots, state.first))
    ended = state.best_shared
    return Inherited(models, shared=ended if ended is not None and ended.offset is not None else state.shared)


def renewed(state: IfcaState, renewal: Renewal) -> IfcaState:
    """Return the state in the next mask epoch; cluster identities and the state of the broadcast stay."""
    kept = _one_start(state)
    slots = tuple(fresh_slot(renewal, model) for model, _ in enumerate(kept.slots, kept.first))
    news = state.news
    if kept.settled and not state.settled:
        news += (Event(renewal.round, "restarts-ended", {"start": kept.start, "finished": bool(state.best)}),)
    return dataclasses.replace(
        kept,
        slots=slots,
        first=slots[0].origin,
        shared=None if kept.shared is None else slots[0],
        best=tuple(fresh_slot(renewal, model) for model, _ in enumerate(kept.best, kept.best_start * len(kept.best))),
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
    """Return the state with one start if weight sharing is on: the best finished one, else the current one."""
    if state.settled or state.shared is None:
        return state
    if state.best:
        return dataclasses.replace(state.settle(), best_loss=None, best_choice={})
    return dataclasses.replace(state, settled=True)
