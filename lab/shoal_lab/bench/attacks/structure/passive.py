"""Coordinates of one hidden unit, from honest updates: they move together over devices and rounds.

Correlation of masked coordinates under permutations, and of independent components under a rotation, whose coordinates
belong to no unit. Components are those of Hyvarinen and Oja (2000).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from shoal_lab.bench.attacks.base import Attack, Result
from shoal_lab.bench.attacks.lab import Lab
from shoal_lab.bench.attacks.structure import sizes
from shoal_lab.bench.attacks.structure.active import COMPONENTS, Score, best_of, mean
from shoal_lab.bench.attacks.structure.components import Components, analyse, mixed
from shoal_lab.bench.attacks.structure.fleet import MaskedFleet
from shoal_lab.bench.attacks.structure.keys import LIFETIMES, Lifetime
from shoal_lab.bench.attacks.structure.network import Rows
from shoal_lab.bench.attacks.structure.units import agreement, neighbours, one_hot

WHO: Final = "aggregator that follows the protocol; no device, no initial model"
BATCH: Final = 20


def honest(lab: Lab, devices: int) -> list[tuple[int, Rows]]:
    """Return (round, clear updates) of the analysed rounds of a FedAvg run, the same for every mode and key lifetime."""

    def trained() -> list[tuple[int, Rows]]:
        fleet, wanted, kept = MaskedFleet(lab, "none", "round", devices, batch=BATCH), sizes.rounds(lab, devices), []
        for round_ in range(1, wanted[-1] + 1):
            updates = fleet.train()
            fleet.announce(updates.mean(0))
            if round_ in wanted:
                kept.append((round_, updates))
        return kept

    return lab.once(f"honest run {devices}", trained)


def score_coordinates(fleet: MaskedFleet, round_: int, clear: Rows, rng: np.random.Generator) -> Score:
    """Return how often a coordinate's nearest one is of its unit, and how often a random one is, for updates (n, d)."""
    places, hidden = fleet.keys.places(round_), fleet.network.hidden
    live = (clear != 0).any(0)[places]
    sent = fleet.keys.masked(clear, round_)[:, live]
    energies = one_hot(fleet.network.unit[places], hidden)[live]
    return agreement(neighbours(sent), energies), agreement(rng.permutation(len(energies)), energies)


def score_components(fleet: MaskedFleet, round_: int, sent: Rows, rng: np.random.Generator) -> Score:
    """Return the same for independent components of ``sent`` (n, d), beside random mixtures of the principal ones."""

    def score(found: Components) -> float:
        nearest = neighbours(np.abs(found.activity).astype(np.float32))
        return agreement(nearest, fleet.energies(found.directions, round_))

    return score(analyse(sent, COMPONENTS)), score(mixed(sent, rng, COMPONENTS))


def structure(lab: Lab, mode: str, lifetime: Lifetime, devices: int) -> Result:
    """Return how often the nearest coordinate, or component under a rotation, is of the same hidden unit."""
    fleet, rng, rounds = MaskedFleet(lab, mode, lifetime, devices), lab.rng("passive null"), honest(lab, devices)
    last = rounds[-1][0]
    if lifetime == "run":
        rounds = [(last, np.concatenate([clear for _, clear in rounds])[-sizes.POOLED :])]
    keeps = lab.keeps(mode)
    if keeps == "order":
        energies, order = (
            one_hot(fleet.network.unit, fleet.network.hidden),
            np.argsort(fleet.network.unit, kind="stable"),
        )
        other = np.empty_like(order)
        other[order] = np.roll(order, 1)
        scores = [(agreement(other, energies), agreement(rng.permutation(len(energies)), energies))]
        note = "no mask: the layout is public"
    elif keeps == "lengths":
        sent = [(r, fleet.keys.masked(clear, r)) for r, clear in rounds]
        alone = [score_components(fleet, r, one, rng) for r, one in sent]
        scores, note = [(mean(alone, 0), mean(alone, 1))], "independent components"
        if len(sent) > 1:
            together = np.concatenate([one for _, one in sent])[-sizes.POOLED :]
            scores.append(score_components(fleet, last, together, rng))
    else:
        alone = [score_coordinates(fleet, r, clear, rng) for r, clear in rounds]
        scores, note = [(mean(alone, 0), mean(alone, 1))], "nearest coordinate by correlation"
    note = "; ".join(filter(None, (note, f"{last} rounds", sizes.beyond(lab, devices))))
    return best_of(scores, name="structure-passive", attacker=WHO, keys=lifetime, devices=devices, note=note)


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the attack's result for each key lifetime and fleet size."""
    return [structure(lab, mode, keys, n) for keys in LIFETIMES for n in sizes.fleets(lab, many=keys == "round")]


ATTACK: Final = Attack("structure, passive", "Hyvarinen and Oja 2000 (components)", WHO, run)
