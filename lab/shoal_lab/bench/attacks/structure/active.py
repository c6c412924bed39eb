"""The hidden unit of each masked coordinate, for an aggregator that announces crafted means and watches the uploads.

Random means make random models, in which each hidden unit is alive for some images and dead for others. Under permutations,
with signs or without, a dead unit's coordinates are zero together. Under a rotation every coordinate moves, so independent
components are grouped instead. Crafted models are those of Boenisch et al., "When the Curious Abandon Honesty" (2023).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from shoal_lab.bench.attacks.base import Attack, Result
from shoal_lab.bench.attacks.lab import Lab
from shoal_lab.bench.attacks.structure import sizes
from shoal_lab.bench.attacks.structure.components import Components, analyse, mixed
from shoal_lab.bench.attacks.structure.fleet import MaskedFleet
from shoal_lab.bench.attacks.structure.keys import LIFETIMES, Lifetime
from shoal_lab.bench.attacks.structure.network import Rows
from shoal_lab.bench.attacks.structure.units import by_activity, by_silence, one_hot, share_assigned, silent_patterns

WHO: Final = "aggregator that crafts the means it announces; no device, no initial model"
SPREAD: Final = 0.1
"""Standard deviation of a crafted mean's coordinates."""
LATER_SPREAD: Final = 0.02
"""The same after the first step, where steps add up."""
COMPONENTS: Final = 300
"""Most components in one analysis of more vectors than one round has."""
MARGIN: Final = 0.05

Score = tuple[float, float]


def crafted(lab: Lab, mode: str, lifetime: Lifetime, devices: int) -> tuple[MaskedFleet, list[tuple[int, Rows, Rows]]]:
    """Announce crafted means, and return the fleet and (round, masked uploads, clear ones) of the analysed rounds."""
    fleet, rng, heard = MaskedFleet(lab, mode, lifetime, devices), lab.rng(f"crafted {devices}"), []
    wanted = sizes.rounds(lab, devices)
    if lifetime == "run":  # rounds add up here, so that all that can be pooled are used
        wanted = list(
            range(2, 2 + max(4, min(sizes.ROUNDS, -(-lab.trials(sizes.POOLED, sizes.QUICK_POOLED) // devices))))
        )
    for round_ in range(2, wanted[-1] + 1):
        spread = SPREAD if round_ == 2 or lifetime == "run" else LATER_SPREAD
        fleet.announce(rng.normal(0, spread, fleet.network.length).astype(np.float32))
        if round_ in wanted:
            heard.append((round_, fleet.uploads(), fleet.clear))
    return fleet, heard


def score_coordinates(fleet: MaskedFleet, round_: int, sent: Rows, clear: Rows, rng: np.random.Generator) -> Score:
    """Return the share of moved coordinates that zero patterns assign rightly, and that of the same groups dealt at random."""
    hidden, places = fleet.network.hidden, fleet.keys.places(round_)
    live = (clear != 0).any(0)[places]
    labels = by_silence(sent, silent_patterns(sent, hidden))[live]
    energies = one_hot(fleet.network.unit[places], hidden)[live]
    return share_assigned(labels, energies), share_assigned(rng.permutation(labels), energies)


def score_components(fleet: MaskedFleet, round_: int, sent: Rows, rng: np.random.Generator, most: int = 0) -> Score:
    """Return the same for independent components, beside random mixtures of the principal ones."""

    def score(found: Components) -> float:
        labels = by_activity(found.activity, fleet.network.hidden)
        return share_assigned(labels, fleet.energies(found.directions, round_))

    return score(analyse(sent, most)), score(mixed(sent, rng, most))


def structure(lab: Lab, mode: str, lifetime: Lifetime, devices: int) -> Result:
    """Return the share of coordinates, or of components under a rotation, assigned to the right hidden unit."""
    rng = lab.rng(f"structure null {devices}")
    fleet, heard = crafted(lab, mode, lifetime, devices)
    most = lab.trials(sizes.POOLED, sizes.QUICK_POOLED)
    pooled = np.concatenate([sent for _, sent, _ in heard])[-most:]
    clear = np.concatenate([one for *_, one in heard])[-most:]
    last = heard[-1][0]
    keeps = lab.keeps(mode)
    if keeps == "order":
        # The layout of an unmasked model is public; the attacker reads it off.
        units = fleet.network.unit
        energies = one_hot(units, fleet.network.hidden)
        scores, note = [(share_assigned(units, energies), share_assigned(rng.permutation(units), energies))], "no mask"
    elif keeps == "lengths":
        together = score_components(fleet, last, pooled, rng, COMPONENTS)
        alone = [score_components(fleet, r, sent, rng, COMPONENTS) for r, sent, _ in heard if lifetime == "round"]
        scores = [together, *([(mean(alone, 0), mean(alone, 1))] if alone else [])]
        note = f"independent components of {len(pooled)} vectors together" + (", and of each round" if alone else "")
    elif lifetime == "run":
        scores, note = [score_coordinates(fleet, last, pooled, clear, rng)], f"zero patterns of {len(pooled)} vectors"
    else:
        alone = [score_coordinates(fleet, r, sent, one, rng) for r, sent, one in heard]
        scores, note = [(mean(alone, 0), mean(alone, 1))], "zero patterns of single rounds"
    note = "; ".join(filter(None, (note, f"{last} rounds", sizes.beyond(lab, devices))))
    return best_of(scores, name="structure-active", attacker=WHO, keys=lifetime, devices=devices, note=note)


def best_of(scores: list[Score], *, name: str, attacker: str, keys: Lifetime, devices: int, note: str) -> Result:
    """Return the score that is furthest above its chance as a result; the other arguments are those of `Result`."""
    success, chance = max(scores, key=lambda s: s[0] - s[1])
    return Result(
        name=name,
        attacker=attacker,
        success=success,
        chance=chance,
        unit="share",
        margin=MARGIN,
        keys=keys,
        devices=devices,
        note=note,
    )


def mean(scores: list[Score], which: int) -> float:
    """Return the mean of the successes (0) or of the chances (1)."""
    return float(np.mean([score[which] for score in scores]))


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the attack's result for each key lifetime and fleet size."""
    return [structure(lab, mode, keys, n) for keys in LIFETIMES for n in sizes.fleets(lab, many=keys == "round")]


ATTACK: Final = Attack("structure, active", "Boenisch et al. 2023 (malicious models); Hyvarinen and Oja 2000", WHO, run)
