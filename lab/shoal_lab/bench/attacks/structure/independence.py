"""Independent component analysis of crafted updates under a rotation, against the number of vectors, on a small model.

It finds hidden units once vectors under one key outnumber coordinates two to three times; vectors under different keys do not
add up. Hyvarinen and Oja, "Independent Component Analysis: Algorithms and Applications" (2000).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from shoal_lab.bench.attacks.base import Attack, Result
from shoal_lab.bench.attacks.lab import Lab
from shoal_lab.bench.attacks.structure import sizes
from shoal_lab.bench.attacks.structure.components import analyse, mixed
from shoal_lab.bench.attacks.structure.fleet import MaskedFleet
from shoal_lab.bench.attacks.structure.keys import LIFETIMES, Lifetime
from shoal_lab.bench.attacks.structure.network import Network, Rows

WHO: Final = "aggregator that crafts the means it announces; no device, no initial model"
HIDDEN: Final = 8
QUICK_HIDDEN: Final = 4
SPREAD: Final = 0.3
"""Standard deviation of a crafted mean's coordinates."""
DEVICES: Final = 30
VECTORS: Final = (0.1, 1.0, 3.0, 10.0)
"""Vectors for each coordinate."""
QUICK_VECTORS: Final = (0.1, 4.0)
MARGIN: Final = 0.1


def purity(lab: Lab, mode: str, lifetime: Lifetime, per_coordinate: float) -> Result:
    """Return the mean share of a component's energy that lies in one hidden unit; chance is that of mixtures or updates."""
    network = Network.of(lab, lab.trials(HIDDEN, QUICK_HIDDEN))
    fleet, rng = MaskedFleet(lab, mode, lifetime, DEVICES, network=network), lab.rng(f"components {per_coordinate}")
    count = max(DEVICES, int(per_coordinate * network.length))
    rows: list[Rows] = []
    while len(rows) * DEVICES < count:
        # Under fresh keys steps add up, so that later ones are small.
        spread = SPREAD if lifetime == "run" or not rows else SPREAD / 10
        fleet.announce(rng.normal(0, spread, network.length).astype(np.float32))
        rows.append(fleet.uploads())
    sent = np.concatenate(rows)[-count:]

    def score(directions: Rows) -> float:
        return float(fleet.energies(directions, fleet.round).max(1).mean())

    return Result(
        name=f"component analysis, {per_coordinate:g} d vectors",
        attacker=WHO,
        success=score(analyse(sent).directions),
        # Few vectors separate into single updates, which lie in some units more than in others without any analysis.
        chance=max(score(mixed(sent, rng).directions), score((sent - sent.mean(0))[-DEVICES:])),
        unit="share",
        margin=MARGIN,
        keys=lifetime,
        devices=DEVICES,
        note=f"largest share of a component in one of {network.hidden} units; d = {network.length}",
    )


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the results under a mask that mixes coordinates; under the others coordinates are components already."""
    if lab.keeps(mode) != "lengths" or not sizes.fleets(lab):
        return []
    counts = QUICK_VECTORS if lab.quick else VECTORS
    return [purity(lab, mode, keys, count) for keys in LIFETIMES for count in counts]


ATTACK: Final = Attack("component analysis", "Hyvarinen and Oja 2000", WHO, run)
