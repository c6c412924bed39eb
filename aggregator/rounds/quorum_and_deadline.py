"""Decisions of a run that depend on its quorum and its deadlines: when a round may open, and when it closes.

The driver measures time and reports that a deadline has passed; these functions read only the engine's state.

`shortage` finds the first of these reasons for which a run can't go on, with advice to the operator:

    between rounds, at once         the roster has fewer devices than a mean takes
    between rounds, late            too few devices are online
    between rounds, late            too few of the devices that are online hold the run's models
    in a round, late                too few devices have uploaded

Late means after the deadline of the round, or of the gathering of devices before one. A paused run lacks nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from aggregator.rounds.standstill import named
from aggregator.rounds.state import EngineState, Order
from aggregator.rounds.undoing import refused_models
from shoal.membership.statements import signers_needed
from shoal.protocol.messages import DeclineReason
from shoal.util.console import counted

FLEET_TOO_SMALL: Final = "fleet-too-small"
"""Kind of the event in the record of the round after which a run waits because its fleet is too small for a mean."""


def devices_needed(state: EngineState) -> int:
    """Return the least number of online devices with which the next round opens after the deadline.

    A round of training takes ``min_contributors``, also if the fleet has become smaller: with fewer it could change no model.
    The final round makes no mean, so the devices that are left are enough.
    """
    least = state.run.recipe.min_contributors
    return max(1, least if next_trains(state) else min(least, len(state.devices)))


def next_trains(state: EngineState) -> bool:
    """Return whether the next round is one of training, and not the final one."""
    return not state.stopped and state.round < state.run.recipe.rounds


def is_too_small(state: EngineState) -> bool:
    """Return whether the next round can't open because the roster has fewer devices than a mean takes.

    A device that the owner has admitted counts even before it connects: it has to be started, and no other device admitted.
    """
    return not state.finished and next_trains(state) and len(members(state)) < state.run.recipe.min_contributors


def members(state: EngineState) -> frozenset[str]:
    """Return the devices of the fleet, with those that were admitted during the run and have not connected yet."""
    admitted = () if state.roster is None else state.roster.active()
    return frozenset(state.devices) | frozenset(admitted)


def certifiers(state: EngineState) -> int:
    """Return how many devices certify a state of a model, by the roster that devices check with."""
    active = len(state.devices) if state.roster is None else state.roster.active_count
    return signers_needed(state.run.recipe.min_contributors, active)


def uploads_needed(state: EngineState) -> int:
    """Return the least number of uploads with which the open round closes; one is enough if it only collects checkpoints.

    It is the quorum's share of the devices that can do the round. Those that can't bring it no lower than ``min_contributors``.
    """
    if state.checkpoints_only:
        return 1
    share, least = state.run.recipe.quorum, state.run.recipe.min_contributors
    return max(1, math.ceil(share * state.able), min(least, math.ceil(share * state.asked)))


def online_needed(state: EngineState) -> int:
    """Return the least number of online devices with which the next round opens now.

    The first round waits for all devices, later ones for the quorum; after the deadline ``min_contributors`` are enough.
    """
    least = devices_needed(state)
    if state.deadline_passed:
        return least
    share = 1.0 if state.round == 0 else state.run.recipe.quorum
    return max(least, math.ceil(share * len(state.devices)))


def may_open(state: EngineState) -> bool:
    """Return whether enough devices are online to open the next round, no keys are awaited, and the run is not paused."""
    return state.order is not Order.PAUSE and not awaits_keys(state) and len(state.online) >= online_needed(state)


def awaits_keys(state: EngineState) -> bool:
    """Return whether of the owner's newer keys and the roster that belongs to them one has not arrived yet."""
    return state.roster is not None and state.roster.keys_since != state.newest


def may_close(state: EngineState) -> bool:
    """Return whether the open round closes now.

    It closes when every available device with an order has uploaded, or when its deadline has passed, in both cases only
    with the quorum. Without the quorum it closes if it is abandoned, or if the owner has replaced its keys: devices that have
    the newer ones decline the round, and the others may finish it. The owner's order to stop now closes a training round, and
    his order to stop any round of a run that no device could do.
    """
    assert state.plan is not None
    if has_nothing_to_end_with(state):
        return True
    if state.order is Order.STOP_NOW and not state.plan.final:
        return True
    replaced = state.newest > state.held.key_version and not state.plan.final
    if replaced and (not state.awaited or state.deadline_passed):
        return True
    if len(state.received) < uploads_needed(state):
        return is_abandoned(state)
    return not state.awaited or state.deadline_passed


def has_nothing_to_end_with(state: EngineState) -> bool:
    """Return whether the owner has stopped a run in which no model has changed yet, and no device has work or has done any.

    The devices' data do not fit its task, say. Its last rounds wait for nobody: a later run would wait behind it.
    """
    changed = any(state_id.round for state_id in state.held.states.names.values())
    return state.stopped and not (changed or state.awaited or state.received)


def is_abandoned(state: EngineState) -> bool:
    """Return whether the open round should close empty: after its deadline, with no device available, while others wait.

    A round may ask very few devices, such as one newcomer for its cold start. The fleet does not wait for their return. The
    others are online without an assignment, or have declined for lack of a model and can take a checkpoint in a later round.
    Before the deadline the round waits for devices that hold the model, so that declines use up no rounds.
    """
    plan = state.plan
    # A final round stays open: its figures are the result of the run, and no later round could collect them. One that all
    # devices present have declined waits for a device that holds the model: its return gives the others their result too.
    # If they have refused a mean, nobody can hold it: the run ends, and they keep the models of the round before.
    if plan is not None and plan.final and refused_models(dict(state.disputed.items()), ()):
        return not state.received and state.deadline_passed
    if plan is None or plan.final or state.received or not state.deadline_passed:
        return False
    return not state.awaited and (state.unasked > 0 or any(device in state.online for device in state.lacking))


END_HINT: Final = "end the run with shoal-fleet run stop, and sign another"
TOO_SMALL_HINT: Final = (
    "admit another device, and the run goes on: shoal-fleet invite, then approve; or end it with shoal-fleet run stop, and "
    "sign a run with a smaller --min-contributors (devices can then read means of so few)"
)
_DISK: Final = DeclineReason.DISK.name.lower()
"""Name of the reason of a device whose disk is full: its program has ended and must be started again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shortage:
    """Too few devices for a run to go on.

    Attributes:
        reason: the number of devices that are there, and the number needed, as text.
        hint: advice to the operator.
        missing: the missing devices, in name order; empty if the fleet has no others.
        unable: those of them that are online and have declined, or whose upload was refused.
        here: number of devices that have uploaded; between rounds, number of devices online.
        needed: least value of ``here`` with which the run goes on.
        late: whether a deadline has passed; a fleet that is too small is known at once.
    """

    reason: str
    hint: str
    missing: tuple[str, ...]
    here: int
    needed: int
    unable: tuple[str, ...] = ()
    late: bool = True


def shortage(state: EngineState) -> Shortage | None:
    """Return why the run can't go on for lack of devices; None if it can, or may before its deadline."""
    if state.finished or is_paused(state):
        return None
    if state.plan is None and is_too_small(state):
        return _too_small(state)
    if not state.deadline_passed:
        return None
    return _in_a_round(state) if state.plan is not None else _between_rounds(state)


def is_paused(state: EngineState) -> bool:
    """Return whether the run waits for the owner to resume it, and for no device."""
    return state.plan is None and state.order is Order.PAUSE


def _too_small(state: EngineState) -> Shortage:
    count, least = len(members(state)), state.run.recipe.min_contributors
    few = counted(count, "device") if count else "no device"
    reason = f"the fleet has {few}, and a mean takes {least} (min_contributors)"
    return Shortage(reason=reason, hint=TOO_SMALL_HINT, missing=(), here=len(state.online), needed=least, late=False)


def _between_rounds(state: EngineState) -> Shortage | None:
    missing = tuple(sorted(members(state) - state.online))
    here, needed = len(state.online), devices_needed(state)
    if here >= needed:
        return _without_models(state) if may_open(state) else None
    reason = f"{here} here and {needed} must be (min_contributors {state.run.recipe.min_contributors})"
    return Shortage(reason=reason, hint=_advice(state, missing, ()), missing=missing, here=here, needed=needed)


def _without_models(state: EngineState) -> Shortage:
    """Return the shortage of a run whose next round has not opened although enough devices are online."""
    holders = [d for d in sorted(members(state)) if state.held.is_current(d)]
    away = tuple(d for d in holders if d not in state.online)
    here, needed = len(holders) - len(away), certifiers(state)
    hold = f"{here or 'none'} of them {'holds' if here < 2 else 'hold'} its models"
    reason = f"{counted(len(state.online), 'device')} online, and {hold}: {needed} must, to certify them for the others"
    hint = f"start {named(away)} again, or {END_HINT}" if away else END_HINT
    return Shortage(reason=reason, hint=hint, missing=away, here=here, needed=needed)


def _in_a_round(state: EngineState) -> Shortage | None:
    missing = tuple(d for d in state.waiting if d in state.devices)
    here, needed = len(state.received), uploads_needed(state)
    if here >= needed or not missing:
        return None
    unable = tuple(d for d in missing if d in state.online and state.unable.get(d) not in (None, _DISK))
    held = state.able < state.asked and needed == state.run.recipe.min_contributors
    rule = f"min_contributors {needed}" if held else f"quorum {state.run.recipe.quorum:g}"
    reason = f"{here} answered and {needed} must ({rule})"
    hint = _advice(state, missing, unable)
    return Shortage(reason=reason, hint=hint, missing=missing, here=here, needed=needed, unable=unable)


def _advice(state: EngineState, missing: tuple[str, ...], unable: tuple[str, ...]) -> str:
    """Return advice about missing devices, of which those in ``unable`` are online."""
    absent = [d for d in missing if d not in unable]
    ways = []
    if unable:
        ways.append(f"read the reason in the log of {named(unable)}, and sign a run that avoids it")
    if absent:
        ways.append(f"start {named(absent)} again")
    them = "it" if len(missing) == 1 else "them"
    advice = f"{'; '.join(ways)}, or take {them} out of the fleet: shoal-fleet revoke FLEET_DIR NAME"
    remaining, least = len(members(state)) - len(missing), state.run.recipe.min_contributors
    if remaining < least:
        fewer = f"{remaining} left, and means of fewer than {least} are not made"
        advice += f" ({fewer}: then admit another device, or sign a run with a smaller --min-contributors)"
    return advice
