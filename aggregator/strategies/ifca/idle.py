"""IFCA's models that too few devices choose: their mean can't be formed, so they would never change again.

After `IDLE_ROUNDS` rounds such a model is retired if the strategy has found k itself: devices choose among the others from then
on. If the owner has given k, it is refilled: it begins again from the cluster whose devices fit worst, as that cluster's model
plus the mean update of the worst half of them. With a ``min_contributors`` of 1, as in the paper, a given k is left alone.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from typing import Final

import numpy as np

from aggregator.numerics.trimmed import winsorised
from aggregator.strategies.base import Average, ClientUpdate, Event
from aggregator.strategies.ifca.broadcast import Broadcast
from aggregator.strategies.ifca.state import IfcaState
from shoal.protocol.documents import RunPlan

IDLE_ROUNDS: Final = 3
"""Rounds in a row with too few devices after which a model is retired or refilled."""

Step = tuple[IfcaState, tuple[Event, ...]]


def counted(state: IfcaState, least: int) -> IfcaState:
    """Return the state with one more round counted for each model that fewer than ``least`` devices chose last.

    Until all devices have chosen, nothing is counted: under partial participation the others may still choose it.
    """
    if any(device not in state.choice for device in state.devices):
        return dataclasses.replace(state, idle={})
    sizes = Counter(state.choice.values())
    live = [j for j in range(len(state.slots)) if j not in state.retired]
    idle = {j: state.idle.get(j, 0) + 1 for j in live if sizes[j] < least}
    return dataclasses.replace(state, idle=idle)


def retire(state: IfcaState, round_: int) -> Step:
    """Return the state without models that have been idle for too long, and an event for each; one model always stays."""
    events: list[Event] = []
    for j, rounds in sorted(state.idle.items()):
        if rounds < IDLE_ROUNDS or len(state.retired) == len(state.slots) - 1:
            continue
        left = {device: own for device, own in state.choice.items() if own != j}
        detail = {"model": state.first + j, "devices": len(state.choice) - len(left), "rounds": rounds}
        idle = {other: count for other, count in state.idle.items() if other != j}
        # All devices choose again before any is sent its own model alone.
        state = dataclasses.replace(state, choice=left, idle=idle, retired=state.retired | {j}, broadcast=Broadcast())
        events.append(Event(round_, "model-retired", detail))
    return state, tuple(events)


def refill(
    state: IfcaState,
    before: IfcaState,
    given: list[ClientUpdate],
    run: RunPlan,
    average: Average,
    weighting: str,
    round_: int,
) -> Step:
    """Return the state with the model refilled that has been idle longest, and an event; nothing if no cluster can spare devices.

    Args:
        state: after the round's means.
        before: the state in the round, from whose models the devices trained.
        given: the round's contributions.
        run: gives min_contributors and weight_cap.
        average: forms the mean update.
        weighting: of that mean.
        round_: the round's number.
    """
    waiting = [j for j, rounds in state.idle.items() if rounds >= IDLE_ROUNDS]
    least = max(1, run.recipe.min_contributors)
    chosen: dict[int, list[ClientUpdate]] = {}
    for c in given:
        chosen.setdefault(c.model - before.first, []).append(c)
    large = {j: found for j, found in chosen.items() if len(found) >= 2 * least}
    if not waiting or not large:
        return state, ()
    empty = max(waiting, key=lambda j: (state.idle[j], -j))
    worst = max(sorted(large), key=lambda j: float(winsorised(np.array([c.loss for c in large[j]])).mean()))
    half = sorted(large[worst], key=lambda c: (-c.loss, c.device))[: max(least, len(large[worst]) // 2)]
    half.sort(key=lambda c: c.device)
    slots = list(state.slots)
    slots[empty] = before.slots[worst].moved(average(half, weighting, run.recipe.weight_cap), len(half), round_)
    idle = {j: rounds for j, rounds in state.idle.items() if j != empty}
    detail = {"model": state.first + empty, "from": state.first + worst, "devices": len(half)}
    state = dataclasses.replace(state, slots=tuple(slots), idle=idle)
    return state, (Event(round_, "model-refilled", detail),)
