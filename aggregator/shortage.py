"""Why a run can't go on for lack of devices, and advice to the operator.

`shortage` finds the first of these reasons:

    between rounds, at once         the roster has fewer devices than a mean takes
    between rounds, late            too few devices are online
    between rounds, late            too few of the devices that are online hold the run's models
    in a round, late                too few devices have uploaded

Late means after the deadline of the round, or of the gathering of devices before one. A paused run lacks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from aggregator.rounds.orders import Order
from aggregator.rounds.quorum_and_deadline import (
    certifiers,
    devices_needed,
    is_too_small,
    may_open,
    members,
    uploads_needed,
)
from aggregator.rounds.standstill import named
from shoal.protocol.messages import DeclineReason
from shoal.util.console import counted

if TYPE_CHECKING:
    from aggregator.rounds.state import EngineState

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
