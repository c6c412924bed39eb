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

import math
from collections.abc import Mapping
from typing import Final

import numpy as np

from aggregator.numerics.trimmed import FIGURE_STEP, inner, winsorised

GAIN: Final = 2.0
"""Least mean gain of a group, in standard deviations: about 98 % of normally distributed gains are above 0 then."""


def gain_of_groups(one: Mapping[str, float], own: Mapping[str, float], clusters: Mapping[str, int]) -> float | None:
    """Return the mean relative gain of the group that gains least, in standard deviations of the gains within groups.

    The relative gain of a device is 2 (one - own) / (one + own), between -2 and 2, so that devices with high losses do not
    outweigh others. Of a group of five or more the mean is trimmed, and the deviation that of Yuen's t for one device.

    Args:
        one: each device's loss with the one model.
        own: each device's loss with its group's model; devices that are not in both do not count.
        clusters: the group of each device.

    Returns:
        the gain; None if a group has no device that counts, or none has two.
    """
    figures: dict[int, list[tuple[float, float]]] = {group: [] for group in clusters.values()}
    for device in one.keys() & own.keys() & clusters.keys():
        total = one[device] + own[device]
        gain = (2.0 * (one[device] - own[device]) / total, 2.0 * FIGURE_STEP / total) if total > 0 else (0.0, 0.0)
        figures[clusters[device]].append(gain)
    if not all(figures.values()):
        return None
    least, floor, squares, freedom = math.inf, 0.0, 0.0, 0
    for group in figures.values():
        gains, steps = np.array(group).T
        kept, bounded = inner(gains), winsorised(gains)
        inside = int(kept.sum())
        least = min(least, float(gains[kept].mean()))
        floor = max(floor, float(winsorised(steps).max()))
        squares += float(np.square(bounded - bounded.mean()).sum()) * len(gains) / inside
        freedom += inside - 1
    if not freedom:
        return None
    spread = max(math.sqrt(squares / freedom), floor)
    return least / spread if spread > 0 else 0.0
