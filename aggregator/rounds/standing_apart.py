"""Devices whose updates are outliers in their cluster for several rounds in a row.

A rule of `aggregator.numerics.robust` weighs the updates of each mean. Once is chance; after `ROUNDS_APART` rounds in a row the
owner is told the device's name. Rounds in which a device was in no mean do not count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from aggregator.strategies.base import STANDS_APART, Event
from aggregator.strategies.robust import Finding, Standings

ROUNDS_APART: Final = 3
"""Rounds in a row, among those in which the device was in a mean, after which it is named."""


def observed(
    known: Standings, found: Mapping[str, Finding], round_: int, rule: str
) -> tuple[Standings, tuple[Event, ...]]:
    """Return what is known of the devices after a round, and an event for each that reaches `ROUNDS_APART`.

    Args:
        known: what was known before.
        found: the round's findings, see `RobustMean.take`.
        round_: number of the round.
        rule: the run's robust rule.
    """
    if not found:
        return known, ()
    rounds = {device: count for device, count in known.rounds.items() if device not in found}
    rounds |= {device: known.rounds.get(device, 0) + 1 for device, one in found.items() if one.apart}
    against = dict(known.against)
    for device, one in found.items():
        models = {model for model in against.pop(device, ()) if model not in one.against}
        models |= {model for model, is_against in one.against.items() if is_against}
        if models:
            against[device] = tuple(sorted(models))
    named = sorted(device for device, one in found.items() if one.apart and rounds[device] == ROUNDS_APART)
    events = tuple(
        Event(round_, STANDS_APART, {"device": device, "rounds": ROUNDS_APART, "robust": rule}) for device in named
    )
    return Standings(rounds, against), events
