"""Decisions of a run that depend on its quorum and its deadlines: when a round may open, and when it closes.

The driver measures time and reports that a deadline has passed; these functions read only the engine's state.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from aggregator.rounds.orders import Order
from shoal.membership.statements import signers_needed

if TYPE_CHECKING:
    from aggregator.rounds.state import EngineState

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
    the newer ones decline the round, and the others may finish it. The owner's order to stop now closes a training round.
    """
    assert state.plan is not None
    if state.order is Order.STOP_NOW and not state.plan.final:
        return True
    replaced = state.newest > state.held.key_version and not state.plan.final
    if replaced and (not state.awaited or state.deadline_passed):
        return True
    if len(state.received) < uploads_needed(state):
        return is_abandoned(state)
    return not state.awaited or state.deadline_passed


def is_abandoned(state: EngineState) -> bool:
    """Return whether the open round should close empty: after its deadline, with no device available, while others wait.

    A round may ask very few devices, such as one newcomer for its cold start. The fleet does not wait for their return. The
    others are online without an assignment, or have declined for lack of a model and can take a checkpoint in a later round.
    Before the deadline the round waits for devices that hold the model, so that declines use up no rounds.
    """
    plan = state.plan
    # A final round stays open: its figures are the result of the run, and no later round could collect them. One that all
    # devices present have declined waits for a device that holds the model: its return gives the others their result too.
    if plan is None or plan.final or state.received or not state.deadline_passed:
        return False
    return not state.awaited and (state.unasked > 0 or any(device in state.online for device in state.lacking))
