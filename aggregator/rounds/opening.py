"""The opening of a round under round keys: its plan, the models that it offers, and the checkpoints that it orders.

A strategy plans with all available devices first. Those that lack a model and can't get it from a checkpoint are left out,
unless too few would remain, and the strategy plans again. All follows from the strategy's state, the models and the available
devices, so a restarted aggregator opens the same round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from aggregator.rounds.held_models import HeldModels, KeptStep, lost, offers_of, open_states, sealing, unable
from aggregator.rounds.relay import States, is_state, numbers_in, replace_models
from aggregator.strategies.base import ClusterModel, Event, RoundPlan
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import SHARED_MODEL
from shoal.protocol.states import StateId

Planning = Callable[[Any, tuple[str, ...]], tuple[Any, RoundPlan]]
"""Returns, for a strategy's state and the devices that take part, the state in the round and its plan."""


@dataclass(frozen=True, slots=True)
class Opening:
    """A round that opens.

    Attributes:
        before, held: the strategy's state and the models, from which the same opening follows again.
        after: the strategy's state in the round.
        plan: with the checkpoints that it orders.
        events: models that went back to an earlier state.
    """

    before: Any
    held: HeldModels
    after: Any
    plan: RoundPlan
    events: tuple[Event, ...] = ()


def prepare(before: Any, held: HeldModels, available: tuple[str, ...], run: RunPlan, planning: Planning) -> Opening:
    """Return the round that opens.

    Args:
        before: the strategy's state.
        held: the models, with the key version of the round.
        available: the devices that could take part.
        run: the owner's plan.
        planning: makes the strategy's plan.

    Raises:
        IntegrityError: the strategy offers a model that devices can't make.
    """
    after, plan = _planned(before, held, available, planning)
    events: list[Event] = []
    for model, state in lost(held, plan, offers_of(plan, held.states), available).items():
        before, held = _back(before, held, plan, model, state, run)
        events.append(Event(plan.round, "model_went_back", {"model": model, "to": state.round}))
    if events:
        after, plan = _planned(before, held, available, planning)
    least = run.min_contributors
    lacking = frozenset(unable(held, plan, offers_of(plan, held.states), available, least))
    there = tuple(d for d in available if d not in lacking)
    if lacking and len(there) >= max(1, min(least, len(available))):
        after, plan = _planned(before, held, there, planning)
    assignments = sealing(held, plan, offers_of(plan, held.states), run, waiting=bool(lacking))
    plan = dataclasses.replace(plan, assignments=assignments)
    return Opening(before=before, held=held, after=after, plan=plan, events=tuple(events))


def _planned(before: Any, held: HeldModels, devices: tuple[str, ...], planning: Planning) -> tuple[Any, RoundPlan]:
    """Return the strategy's state in the round and its plan, with its models at states."""
    after, plan = planning(before, devices)
    if not plan.final:
        return after, plan
    number_of = {state: number for number, state in held.states.names.items()}
    models = {}
    for model, value in plan.models.items():
        # A sum of other models has become a state with the last step.
        number = number_of.get(StateId(model, held.closed))
        models[model] = value if is_state(value) or number is None else ClusterModel(number, version=value.version)
    return after, dataclasses.replace(plan, models=models)


def _back(
    before: Any, held: HeldModels, plan: RoundPlan, model: int, state: StateId, run: RunPlan
) -> tuple[Any, HeldModels]:
    """Return the strategy's state and the models with one model at an earlier state, which devices see as open."""
    value = plan.shared if model == SHARED_MODEL else plan.models[model]
    assert value is not None
    states = held.states
    number = next((n for n, ref in sorted(states.names.items()) if ref == state), states.next)
    names = {**states.names, number: state}
    gone = value.origin

    def swap(found: ClusterModel) -> ClusterModel:
        return ClusterModel(number, version=found.version) if found.origin == gone and is_state(found) else found

    before = replace_models(before, swap)
    used = numbers_in(before)
    states = States(names, max(states.next, number + 1))
    last = held.steps[-1]
    step = dataclasses.replace(last.step, open=open_states(states, used, run))
    return before, dataclasses.replace(held, states=states, steps=(*held.steps[:-1], KeptStep(step, last.means)))
