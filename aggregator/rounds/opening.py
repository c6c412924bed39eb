"""The opening of a round: its plan, the models that it offers, and the checkpoints that it orders.

A strategy plans with all available devices first. Those that lack a model and can't get it from a checkpoint are left out,
and the strategy plans again. If too few would remain, `prepare` takes the first of these ways:

1. A round of checkpoints only, in which the devices that hold a model hand it over. The strategy does not see this round.
2. No round yet: devices that hold the model may come back.
3. After the deadline, models go back to their last certified checkpoints, if a device can open those.
4. Devices of which the aggregator can't be sure are asked all the same. Each is asked once: it declines, or takes part.

No device is left out of the final round, since it would end without a result: one that lacks its model declines, does not
count in the quorum, and takes the checkpoint that is announced when the run is over.

Newcomers that are to be placed by comparing directions need states that were made long ago. Those that lack one wait for one
round, if a device that takes part in it can seal the state, and the round offers it for that purpose alone. If none can, the
strategy's other plan (`RoundPlan.otherwise`) is followed.

Where the others are enough for a round, a cluster may still have too few devices that hold its model: fewer than a mean takes,
and than certify a state. After some rounds such a model is rolled back to its last certified checkpoint as well
(`aggregator.rounds.missing_states.uncertifiable`).

All follows from the strategy's state, the models and the available devices, so a restarted aggregator opens the same round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from aggregator.rounds.held_models import HeldModels, KeptStep, offers_of, open_states
from aggregator.rounds.missing_states import can_hand_on, handing_over, lost, outdated, sealing, unable, uncertifiable
from aggregator.rounds.relay import States, is_state, numbers_in, replace_models
from aggregator.strategies.base import ClusterModel, Event, RoundPlan
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import SHARED_MODEL, Assignment, Phase
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
        events: models that went back to an earlier state, and checkpoints that were ordered instead of updates.
        checkpoints_only: whether devices only hand over checkpoints; ``after`` is ``before`` then.
    """

    before: Any
    held: HeldModels
    after: Any
    plan: RoundPlan
    events: tuple[Event, ...] = ()
    checkpoints_only: bool = False


def prepare(
    before: Any,
    held: HeldModels,
    available: tuple[str, ...],
    run: RunPlan,
    planning: Planning,
    *,
    waited: bool = True,
    signers: int,
) -> Opening | None:
    """Return the round that opens; None while it has to wait for devices that hold its models.

    Args:
        before: the strategy's state.
        held: the models, with the key version of the round.
        available: the devices that could take part.
        run: the owner's plan.
        planning: makes the strategy's plan.
        waited: whether the deadline for devices to come has passed.
        signers: statements that signers a state (`signers_needed`).

    Raises:
        IntegrityError: the strategy offers a model that devices can't make.
    """
    least = run.recipe.min_contributors
    events: list[Event] = []
    while True:
        choice = _with_placements(before, held, available, least, signers, planning)
        after, plan, there, lent = choice.after, choice.plan, choice.devices, choice.lent
        offers = offers_of(plan, held.states)
        lacking = frozenset(unable(held, plan, offers, there, signers))
        able = tuple(d for d in there if d not in lacking)
        back = lost(held, plan, offers, available, signers)
        if not back and not plan.final:
            back = uncertifiable(held, plan, offers, available, signers)
        if not back and len(able) < (1 if plan.final else max(1, min(least, len(available)))):
            orders = {} if plan.final else handing_over(held, plan, offers, signers, run, available)
            if orders:
                return _checkpoint_round(before, held, plan, orders, events)
            if not waited:
                return None
            back = outdated(held, plan, offers, available, signers)
            if not back:
                unsure = lacking & (held.named.keys() | held.trained.keys()) - held.lacking.keys()
                able = tuple(d for d in available if d not in lacking or d in unsure)
                if not unsure or len(able) < min(least, len(available)):
                    return None
        if not back:
            break
        for model, state in back.items():
            before, held = _back(before, held, plan, model, state, run)
            detail = {"model": model, "from": offers[model].round, "to": state.round}
            events.append(Event(plan.round, "model_went_back", detail))
    if lacking and not plan.final:
        after, plan = _planned(before, held, able, choice.planning)
    offered = {value.origin for value in plan.models.values()}
    lent = {m: value for m, value in lent.items() if value.origin not in offered}
    plan = dataclasses.replace(plan, models={**lent, **plan.models}, otherwise=None)
    waiting = bool(lacking or lent)
    assignments = sealing(held, plan, offers_of(plan, held.states), run, waiting=waiting, signers=signers)
    plan = dataclasses.replace(plan, assignments=assignments)
    return Opening(before=before, held=held, after=after, plan=plan, events=tuple(events))


@dataclass(frozen=True, slots=True)
class _Choice:
    """A strategy's plan, or its other one.

    Attributes:
        after, plan: the strategy's state in the round and its plan.
        planning: makes the same choice for other devices.
        devices: those that the plan is for; the others wait.
        lent: models that they wait for, to offer as well.
    """

    after: Any
    plan: RoundPlan
    planning: Planning
    devices: tuple[str, ...]
    lent: Mapping[int, ClusterModel] = field(default_factory=dict)


def _with_placements(
    before: Any, held: HeldModels, available: tuple[str, ...], least: int, signers: int, planning: Planning
) -> _Choice:
    """Return the plan, without newcomers that wait for a model to compare with, or the other plan if none can hand it over."""
    after, plan = _planned(before, held, available, planning)
    choice, otherwise = _Choice(after, plan, planning, available), plan.otherwise
    if otherwise is None:
        return choice
    offers = offers_of(plan, held.states)
    lacking = unable(held, plan, offers, available, signers)
    orders = [plan.assignments[d] for d in lacking if d in plan.assignments]
    lent = {model: plan.models[model] for o in orders if o.phase is Phase.PLACE for model in o.models}
    if not lent:
        return choice
    rest = tuple(d for d in available if d not in lacking)
    if len(rest) >= max(1, min(least, len(available))):
        after, plan = _planned(before, held, rest, planning)
        if can_hand_on(held, plan, (offers[model] for model in lent), signers):
            return _Choice(after, plan, planning, rest, lent)
    after, plan = otherwise
    return _Choice(after, plan, lambda state, devices: _other(planning(state, devices)), available)


def _other(planned: tuple[Any, RoundPlan]) -> tuple[Any, RoundPlan]:
    return planned if planned[1].otherwise is None else planned[1].otherwise


def _checkpoint_round(
    before: Any, held: HeldModels, plan: RoundPlan, orders: dict[str, Assignment], events: list[Event]
) -> Opening:
    """Return a round in which devices only hand over checkpoints, of the models that the strategy has planned to offer."""
    seals = {device: list(order.seal) for device, order in orders.items() if order.seal}
    ordered = Event(plan.round, "checkpoints_ordered", {"models": seals})
    plan = dataclasses.replace(plan, assignments=orders, seal=frozenset())
    return Opening(before=before, held=held, after=before, plan=plan, events=(*events, ordered), checkpoints_only=True)


def _planned(before: Any, held: HeldModels, devices: tuple[str, ...], planning: Planning) -> tuple[Any, RoundPlan]:
    """Return the strategy's state in the round and its plan, with its models at states."""
    after, plan = planning(before, devices)
    if not plan.final:
        return after, plan
    number_of = {state: number for number, state in held.states.names.items()}
    models = {}
    for model, value in plan.models.items():
        # A sum of other models has become a state with the step of the plan's last round.
        number = number_of.get(StateId(model, plan.round - 1))
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
    spare = {c.state for c in held.certified.values()}.intersection(last.step.open)
    step = dataclasses.replace(last.step, open=open_states(states, used, run, spare))
    return before, dataclasses.replace(held, states=states, steps=(*held.steps[:-1], KeptStep(step, last.means)))
