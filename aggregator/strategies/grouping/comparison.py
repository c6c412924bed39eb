"""Decide between groups and one model by the devices' losses.

Devices that merely hold different labels form groups as well, and a model of theirs soon has the smaller loss: it learns how
common each label is. So the one model is not compared as it is. Both sides have had the same number of rounds, and the one
model's last step is that of the device's own group (`search`), which teaches it the same. What is left is what the group learned
before, apart from the others.

If groups have different data, all devices of a group gain about as much. If they only mix labels differently, each gains as its
own mix will have it. So the mean gain is measured in standard deviations within the groups, and each group has to reach `GAIN`.
Unlike a t value this does not grow with the number of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import numpy as np

GAIN: Final = 2.0
"""Least mean gain of a group, in standard deviations: about 98 % of normally distributed gains are above 0 then."""
LOSS_STEP: Final = 1e-4
"""Unit to which devices round their losses; a spread of gains below one unit can't be told from none."""


def gain_of_groups(one: Mapping[str, float], own: Mapping[str, float], clusters: Mapping[str, int]) -> float | None:
    """Return the mean relative gain of the group that gains least, in standard deviations of the gains within groups.

    The relative gain of a device is 2 (one - own) / (one + own), between -2 and 2, so that devices with high losses do not
    outweigh others.

    Args:
        one: each device's loss with the one model.
        own: each device's loss with its group's model; devices that are not in both do not count.
        clusters: the group of each device.

    Returns:
        the gain; None if a group has no device that counts, or none has two.
    """
    gains: dict[int, list[float]] = {group: [] for group in clusters.values()}
    floor = 0.0
    for device in one.keys() & own.keys() & clusters.keys():
        total = one[device] + own[device]
        gains[clusters[device]].append(2.0 * (one[device] - own[device]) / total if total > 0 else 0.0)
        floor = max(floor, 2.0 * LOSS_STEP / total if total > 0 else 0.0)
    counted = sum(map(len, gains.values()))
    if not all(gains.values()) or counted <= len(gains):
        return None
    squares = sum(float(np.square(np.subtract(g, np.mean(g))).sum()) for g in gains.values())
    spread = max(float(np.sqrt(squares / (counted - len(gains)))), floor)
    least = min(float(np.mean(g)) for g in gains.values())
    return least / spread if spread > 0 else 0.0
