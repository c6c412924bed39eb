"""Devices that lack a state of a model, and the checkpoints that they get it from.

Pure functions of `HeldModels` and the plan of a round:

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
from typing import Final

from aggregator.rounds.held_models import HeldModels, KeptCheckpoint, opens_since
from aggregator.strategies.base import RoundPlan
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import FOR_ALL, Assignment, Phase, Share
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
