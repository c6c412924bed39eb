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
(`uncertifiable`).

All follows from the strategy's state, the models and the available devices, so a restarted aggregator opens the same round.

The functions before `prepare` are of `HeldModels` and the plan of a round:

- `unable` and `lost` name devices that can't take part in the next round, and models that no device holds any more;
- `can_hand_on` says whether devices that lack states get them if they wait for one round;
- `sealing` orders checkpoints from devices, `handing_over` in a round of nothing else;
- `outdated` and `uncertifiable` name models for which that does not help.

Example: dev-5 was away for three rounds, and two are retained. It is `unable` to take part, so `sealing` asks a device in step to
attach a checkpoint to its upload, and dev-5 is back one round later.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from aggregator.rounds.held_models import HeldModels, KeptCheckpoint, KeptStep, offers_of, open_states, opens_since
from aggregator.rounds.relay import States, is_state, numbers_in, replace_models
from aggregator.strategies.base import ClusterModel, Event, RoundPlan
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import FOR_ALL, SHARED_MODEL, Assignment, Phase, Share
from shoal.protocol.states import SPARE_CHECKPOINTS, StateId

CHECKPOINT_EVERY: Final = 10
"""Most rounds between two checkpoints of a model."""
GOLDEN: Final = (math.sqrt(5) - 1) / 2
"""Its products with every second, third or tenth number spread evenly between whole numbers: each device's turn comes."""
FINAL_SEALERS: Final = 1 + SPARE_CHECKPOINTS
"""Devices that seal each model in the final round: two of them may lie or vanish."""
SEALING_DEVICES: Final = 2
"""Devices that seal each model in a round of checkpoints only: one of them may vanish."""


def unable(
    held: HeldModels, plan: RoundPlan, offers: Mapping[int, StateId], available: Iterable[str], least: int
) -> tuple[str, ...]:
    """Return the available devices that lack a state of the round and can't get it from a checkpoint, in order.

    Args:
        held: the models.
        plan: the round's plan if all devices take part.
        offers: state of each model of the plan.
        available: the devices.
        least: statements that certify a state.
    """
    if not held.closed and held.shipped:
        return ()  # all begin with the run package
    needed = _needs(plan, offers)
    return tuple(d for d in available if not needed(d) <= held.in_reach(d, least))


def _needs(plan: RoundPlan, offers: Mapping[int, StateId]) -> Callable[[str], frozenset[StateId]]:
    """Return a function that returns the offered states that a device needs for its assignment.

    A device without one may get any assignment but a placement once others are left out.
    """
    placing = {m for o in plan.assignments.values() if o.phase is Phase.PLACE for m in o.models}
    others = {m for o in plan.assignments.values() if o.phase is not Phase.PLACE for m in o.models}
    for_all = offers.keys() & FOR_ALL
    any_of_them = frozenset(state for model, state in offers.items() if model not in placing - others)

    def needed(device: str) -> frozenset[StateId]:
        assignment = plan.assignments.get(device)
        if assignment is None:
            return any_of_them
        return frozenset(offers[model] for model in {*assignment.models, *for_all} & offers.keys())

    return needed


def can_hand_on(held: HeldModels, plan: RoundPlan, states: Iterable[StateId], least: int) -> bool:
    """Return whether devices with an assignment can seal all of ``states``, and enough have signed them or will.

    Args:
        held: the models.
        plan: the round's plan, without the devices that lack the states.
        states: as the models stand.
        least: statements that certify a state.
    """
    reach = {d: held.in_reach(d, least) for d in plan.assignments}
    for state in states:
        holders = {d for d, found in reach.items() if state in found}
        known = held.evidence.get(state)
        if not holders or len(holders | (known.statements.keys() if known is not None else set())) < least:
            return False
    return True


def lost(
    held: HeldModels, plan: RoundPlan, offers: Mapping[int, StateId], available: Collection[str], least: int
) -> dict[int, StateId]:
    """Return model -> the state that it is rolled back to, for models that the round needs and that no device holds any more.

    That is the state of its last certified checkpoint. A model without one stays where it is.

    Args:
        held: the models.
        plan: the round's plan.
        offers: state of each model of the plan.
        available: the devices that may take part.
        least: statements that certify a state.
    """
    if not held.closed:
        return {}
    asked = {model for o in plan.assignments.values() for model in o.models}
    asked |= offers.keys() & FOR_ALL
    here = {d for d in held.named if d in available or held.is_current(d)}
    there = frozenset[StateId]().union(*(held.held_by(d) for d in sorted(here)))
    announced = held.announced(least)
    reachable = held.reach(c.state for c in announced.values())
    found = {}
    for model in sorted(asked & offers.keys()):
        back = announced.get(model)
        if offers[model] not in there and offers[model] not in reachable and back is not None:
            found[model] = back.state
    return found


def sealing(
    held: HeldModels,
    plan: RoundPlan,
    offers: Mapping[int, StateId],
    run: RunPlan,
    *,
    waiting: bool,
    signers: int,
) -> dict[str, Assignment]:
    """Return the plan's assignments with the checkpoints that the round orders.

    Args:
        held: the models.
        plan: the round's plan.
        offers: state of each model of the plan.
        run: the owner's plan.
        waiting: whether a device waits for a checkpoint.
        signers: statements that certify a state (`signers_needed`).
    """
    # In the final round devices may be asked for models of other clusters, and no later round could repeat it.
    every = waiting or run.recipe.participation < 1 or plan.round >= run.recipe.rounds
    away = [d for d in held.named.keys() | held.lacking.keys() if d not in plan.assignments]
    asked = sorted(plan.assignments)
    left = max((opens_since(held, d) for d in away), default=0)
    newest = {m: max(c.round for c in _of_model(held, m)) if _of_model(held, m) else 0 for m in offers}
    every = every or any(plan.round - newest[m] >= CHECKPOINT_EVERY for m in offers)
    ordered: dict[str, list[int]] = {}
    for place, model in enumerate(offers):
        able = [d for d in asked if held.is_current(d) and offers[model] in held.held_by(d)]
        # Perhaps all devices that were drawn take the model from a checkpoint first.
        able = able or [d for d in asked if offers[model] in held.in_reach(d, signers)]
        # A device that is away now can open what is sealed after it has left, even if all others are gone by then.
        openable = model in held.certified and held.certified[model].round >= left
        # If one more of so few devices goes, the others could return to no newer state.
        scarce = len(able) <= run.recipe.min_contributors
        # Without a checkpoint they could return to none. Where one device certifies, any that is left can go on.
        first = scarce and run.recipe.min_contributors > 1 and model not in held.certified
        needed = first or (away and (scarce or not openable))
        if not (every or model in plan.seal or needed):
            continue
        own = [d for d in able if held.trained.get(d) == model] or able
        # Not in turn: checkpoints that are ordered in every second round would all be of the same half of the devices.
        at = int((plan.round + place) * GOLDEN % 1 * len(own))
        # No later round could replace a bad checkpoint of the final one.
        count = FINAL_SEALERS if plan.final else 1
        for device in list(dict.fromkeys((*own[at:], *own[:at], *able)))[:count]:
            ordered.setdefault(device, []).append(model)
    return {
        d: dataclasses.replace(o, seal=tuple(ordered[d])) if d in ordered else o for d, o in plan.assignments.items()
    }


def handing_over(
    held: HeldModels,
    plan: RoundPlan,
    offers: Mapping[int, StateId],
    least: int,
    run: RunPlan,
    available: Iterable[str],
) -> dict[str, Assignment]:
    """Return the assignments of a round of checkpoints only; none if it would help no device.

    Two holders of each model that an available device lacks seal it. All holders sign its state, since a checkpoint counts
    only once ``least`` devices have signed.

    Args:
        held: the models.
        plan: the strategy's plan for all available devices.
        offers: state of each model of the plan.
        least: statements that certify a state.
        run: the owner's plan.
        available: the devices.
    """
    devices = sorted(available)
    reach = {d: held.in_reach(d, least) for d in devices}
    missed = _missed(plan, offers, reach)
    shared = {offers[model] for model in offers.keys() & FOR_ALL}
    # Where models are added up, a device refuses to take part without all of them.
    needed = set(offers.values()) if run.capabilities.scale else shared
    candidates = {
        d: tuple(m for m in offers if m not in FOR_ALL and offers[m] in reach[d]) for d in devices if needed <= reach[d]
    }
    able = [d for d in devices if candidates.get(d)]
    asked: set[str] = set()
    seals: dict[str, list[int]] = {}
    for place, model in enumerate(offers):
        holders = [d for d in able if offers[model] in reach[d]]
        known = held.evidence.get(offers[model])
        signers = set(holders) if known is None else {*holders, *known.statements}
        if offers[model] in missed and holders and len(signers) >= least:
            asked.update(holders)
            for turn in range(min(SEALING_DEVICES, len(holders))):
                seals.setdefault(holders[(plan.round + place + turn) % len(holders)], []).append(model)
    return {
        d: Assignment(
            phase=Phase.SCORE,
            candidates=candidates[d],
            share=Share.TRAIN,
            train=False,
            evaluate=False,
            margins=False,
            seal=tuple(seals.get(d, ())),
        )
        for d in sorted(asked)
    }


def _missed(
    plan: RoundPlan, offers: Mapping[int, StateId], reach: Mapping[str, frozenset[StateId]]
) -> frozenset[StateId]:
    """Return the offered states that devices need and can't get; ``reach`` has those that each can."""
    needed = _needs(plan, offers)
    return frozenset[StateId]().union(*(needed(d) - found for d, found in reach.items()))


def outdated(
    held: HeldModels, plan: RoundPlan, offers: Mapping[int, StateId], available: Iterable[str], least: int
) -> dict[int, StateId]:
    """Return model -> the state that it is rolled back to, for models that available devices lack and that none can hand over.

    That is the state of its last certified checkpoint, if an available device can open it and pass it on.

    Args:
        held: the models.
        plan: the strategy's plan for all available devices.
        offers: state of each model of the plan.
        available: the devices.
        least: statements that certify a state.
    """
    reach = {d: held.in_reach(d, least) for d in available}
    missed, there = _missed(plan, offers, reach), frozenset[StateId]().union(*reach.values())
    back = {m: c.state for m, c in held.announced(least).items() if offers.get(m) in missed and c.state in there}
    return {m: state for m, state in back.items() if offers[m] != state}


def uncertifiable(
    held: HeldModels, plan: RoundPlan, offers: Mapping[int, StateId], available: Collection[str], least: int
) -> dict[int, StateId]:
    """Return model -> the state that it is rolled back to, for stalled models, since too few devices can certify them.

    Enough devices of the model are available, but fewer than ``least`` have its state or can get it, and with all who have
    signed it they are too few for a certificate. While others are away who hold it, the model waits for them: as many rounds as
    it would lose by going back. So it loses at most twice what it would if the aggregator knew who returns.

    Args:
        held: the models.
        plan: the strategy's plan for all available devices.
        offers: state of each model of the plan.
        available: the devices.
        least: statements that certify a state.
    """
    if not held.closed:
        return {}
    needed, reach = _needs(plan, offers), {d: held.in_reach(d, least) for d in available}
    there = frozenset[StateId]().union(*reach.values())
    found = {}
    for model, checkpoint in held.announced(least).items():
        state, back = offers.get(model), checkpoint.state
        if state is None or state == back or back not in there:
            continue
        asked = [d for d in available if d in plan.assignments and state in needed(d)]
        holders = {d for d in available if state in reach[d]}
        known = held.evidence.get(state)
        signers = holders if known is None else holders | known.statements.keys()
        stood, loses = held.closed - state.round, state.round - back.round
        if len(asked) >= least > len(holders.intersection(asked)) and len(signers) < least and stood >= loses:
            found[model] = back
    return found


def _of_model(held: HeldModels, model: int) -> list[KeptCheckpoint]:
    return [c[model] for c in (held.certified, held.pending) if model in c]


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
