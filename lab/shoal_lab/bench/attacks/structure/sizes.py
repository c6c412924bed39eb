"""Fleet sizes and rounds of the structural attacks, in a full and in a quick run."""

from __future__ import annotations

from typing import Final

import numpy as np

from shoal_lab.bench.attacks.lab import Lab

DEVICES: Final = (15, 100, 450)
"""Fleets whose updates of one round are at most a tenth of the coordinates of the model on digits."""
MANY: Final = (500, 2000)
"""Larger fleets, which are reported only."""
QUICK: Final = (15, 100)
ROUNDS: Final = 200
QUICK_ROUNDS: Final = 12
ANALYSED: Final = 600
"""Vectors of one fleet that are analysed round by round, about; at least eight rounds."""
LARGEST: Final = 20_000
"""Coordinates of the largest model that is attacked: some attacks compare all pairs of coordinates."""
POOLED: Final = 2000
QUICK_POOLED: Final = 900
"""Most vectors that are analysed together."""


def fleets(lab: Lab, *, many: bool = False) -> tuple[int, ...]:
    """Return the numbers of devices, none for a large model; with ``many`` also those above a tenth of the coordinates."""
    if lab.length > LARGEST:
        return ()
    if lab.quick:
        return QUICK
    return DEVICES + MANY if many else DEVICES


def rounds(lab: Lab, devices: int) -> list[int]:
    """Return the rounds, from 1, whose uploads are analysed, the last one included."""
    last = lab.trials(ROUNDS, QUICK_ROUNDS)
    count = lab.trials(max(8, ANALYSED // devices), 3)
    if devices > max(DEVICES):
        last, count = 2, 1
    return sorted({int(r) for r in np.linspace(last, 2, min(count, last - 1))})


def beyond(lab: Lab, devices: int) -> str:
    """Return a note for a fleet with more updates in a round than a tenth of the coordinates, else nothing."""
    return "more vectors under one key than a tenth of the coordinates" if devices > lab.length / 10 else ""
