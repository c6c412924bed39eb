"""The hidden unit of each masked coordinate, from crafted or from honest updates, and components under a rotation.

- `active`: an aggregator announces crafted means and watches the uploads. Random means make random models, in which each hidden
  unit is alive for some images and dead for others. Under permutations, with signs or without, a dead unit's coordinates are zero
  together. Under a rotation every coordinate moves, so independent components are grouped instead. Crafted models are those of
  Boenisch et al., "When the Curious Abandon Honesty" (2023).
- `passive`: coordinates of one unit move together over devices and rounds of honest updates. Correlation of masked coordinates
  under permutations, and of independent components under a rotation, whose coordinates belong to no unit.
- `independence`: component analysis of crafted updates under a rotation, against the number of vectors, on a small model. It
  finds hidden units once vectors under one key outnumber coordinates two to three times; vectors under different keys do not add
  up.

Components are those of Hyvarinen and Oja, "Independent Component Analysis: Algorithms and Applications" (2000).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

import numpy as np

from shoal_lab.bench.attacks.lab import LIFETIMES, Attack, Lab, Lifetime, Result, Rows
from shoal_lab.bench.attacks.structure.fleet import (
    POOLED,
    QUICK_POOLED,
    ROUNDS,
    Components,
    MaskedFleet,
    Network,
    agreement,
    analyse,
    analysed_rounds,
    beyond,
    by_activity,
    by_silence,
    fleet_sizes,
    neighbours,
    one_hot,
    share_assigned,
    silent_patterns,
)

CRAFTS: Final = "aggregator that crafts the means it announces; no device, no initial model"
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
    wanted = analysed_rounds(lab, devices)
    if lifetime == "run":  # rounds add up here, so that all that can be pooled are used
        wanted = list(range(2, 2 + max(4, min(ROUNDS, -(-lab.trials(POOLED, QUICK_POOLED) // devices)))))
    for round_ in range(2, wanted[-1] + 1):
        spread = SPREAD if round_ == 2 or lifetime == "run" else LATER_SPREAD
        fleet.announce(rng.normal(0, spread, fleet.network.length).astype(np.float32))
        if round_ in wanted:
            heard.append((round_, fleet.uploads(), fleet.clear))
    return fleet, heard


def score_silence(fleet: MaskedFleet, round_: int, sent: Rows, clear: Rows, rng: np.random.Generator) -> Score:
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

    return score(analyse(sent, most)), score(analyse(sent, most, rng))


def structure_active(lab: Lab, mode: str, lifetime: Lifetime, devices: int) -> Result:
    """Return the share of coordinates, or of components under a rotation, assigned to the right hidden unit."""
    rng = lab.rng(f"structure null {devices}")
    fleet, heard = crafted(lab, mode, lifetime, devices)
    most = lab.trials(POOLED, QUICK_POOLED)
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
        scores = [together, *([mean(alone)] if alone else [])]
        note = f"independent components of {len(pooled)} vectors together" + (", and of each round" if alone else "")
    elif lifetime == "run":
        scores, note = [score_silence(fleet, last, pooled, clear, rng)], f"zero patterns of {len(pooled)} vectors"
    else:
        alone = [score_silence(fleet, r, sent, one, rng) for r, sent, one in heard]
        scores, note = [mean(alone)], "zero patterns of single rounds"
    notes = (note, f"{last} rounds", beyond(lab, devices))
    return best_of(scores, notes, name="structure-active", attacker=CRAFTS, keys=lifetime, devices=devices)


def best_of(scores: list[Score], notes: Iterable[str], **of: Any) -> Result:
    """Return the score that is furthest above its chance as a result; the other arguments are those of `Result`."""
    success, chance = max(scores, key=lambda s: s[0] - s[1])
    return Result(
        success=success, chance=chance, unit="share", margin=MARGIN, note="; ".join(filter(None, notes)), **of
    )


def mean(scores: list[Score]) -> Score:
    """Return the mean of the successes and that of the chances."""
    successes, chances = zip(*scores, strict=True)
    return float(np.mean(successes)), float(np.mean(chances))


def active(lab: Lab, mode: str) -> list[Result]:
    """Return the attack's result for each key lifetime and fleet size."""
    return [structure_active(lab, mode, keys, n) for keys in LIFETIMES for n in fleet_sizes(lab, many=keys == "round")]


FOLLOWS: Final = "aggregator that follows the protocol; no device, no initial model"
BATCH: Final = 20


def honest(lab: Lab, devices: int) -> list[tuple[int, Rows]]:
    """Return (round, clear updates) of the analysed rounds of a FedAvg run, the same for every mode and key lifetime."""

    def trained() -> list[tuple[int, Rows]]:
        fleet, wanted, kept = MaskedFleet(lab, "none", "round", devices, batch=BATCH), analysed_rounds(lab, devices), []
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


def score_neighbours(fleet: MaskedFleet, round_: int, sent: Rows, rng: np.random.Generator) -> Score:
    """Return the same for independent components of ``sent`` (n, d), beside random mixtures of the principal ones."""

    def score(found: Components) -> float:
        nearest = neighbours(np.abs(found.activity).astype(np.float32))
        return agreement(nearest, fleet.energies(found.directions, round_))

    return score(analyse(sent, COMPONENTS)), score(analyse(sent, COMPONENTS, rng))


def structure_passive(lab: Lab, mode: str, lifetime: Lifetime, devices: int) -> Result:
    """Return how often the nearest coordinate, or component under a rotation, is of the same hidden unit."""
    fleet, rng, rounds = MaskedFleet(lab, mode, lifetime, devices), lab.rng("passive null"), honest(lab, devices)
    last = rounds[-1][0]
    if lifetime == "run":
        rounds = [(last, np.concatenate([clear for _, clear in rounds])[-POOLED:])]
    keeps = lab.keeps(mode)
    if keeps == "order":
        energies = one_hot(fleet.network.unit, fleet.network.hidden)
        order = np.argsort(fleet.network.unit, kind="stable")
        other = np.roll(order, 1)[np.argsort(order)]
        scores = [(agreement(other, energies), agreement(rng.permutation(len(energies)), energies))]
        note = "no mask: the layout is public"
    elif keeps == "lengths":
        sent = [(r, fleet.keys.masked(clear, r)) for r, clear in rounds]
        alone = [score_neighbours(fleet, r, one, rng) for r, one in sent]
        scores, note = [mean(alone)], "independent components"
        if len(sent) > 1:
            together = np.concatenate([one for _, one in sent])[-POOLED:]
            scores.append(score_neighbours(fleet, last, together, rng))
    else:
        alone = [score_coordinates(fleet, r, clear, rng) for r, clear in rounds]
        scores, note = [mean(alone)], "nearest coordinate by correlation"
    notes = (note, f"{last} rounds", beyond(lab, devices))
    return best_of(scores, notes, name="structure-passive", attacker=FOLLOWS, keys=lifetime, devices=devices)


def passive(lab: Lab, mode: str) -> list[Result]:
    """Return the attack's result for each key lifetime and fleet size."""
    return [structure_passive(lab, mode, keys, n) for keys in LIFETIMES for n in fleet_sizes(lab, many=keys == "round")]


HIDDEN: Final = 8
QUICK_HIDDEN: Final = 4
WIDE_SPREAD: Final = 0.3
"""Standard deviation of a crafted mean's coordinates."""
DEVICES: Final = 30
VECTORS: Final = (0.1, 1.0, 3.0, 10.0)
"""Vectors for each coordinate."""
QUICK_VECTORS: Final = (0.1, 4.0)


def purity(lab: Lab, mode: str, lifetime: Lifetime, per_coordinate: float) -> Result:
    """Return the mean share of a component's energy that lies in one hidden unit; chance is that of mixtures or updates."""
    network = Network.of(lab, lab.trials(HIDDEN, QUICK_HIDDEN))
    fleet, rng = MaskedFleet(lab, mode, lifetime, DEVICES, network=network), lab.rng(f"components {per_coordinate}")
    count = max(DEVICES, int(per_coordinate * network.length))
    rows: list[Rows] = []
    while len(rows) * DEVICES < count:
        # Under fresh keys steps add up, so that later ones are small.
        spread = WIDE_SPREAD if lifetime == "run" or not rows else WIDE_SPREAD / 10
        fleet.announce(rng.normal(0, spread, network.length).astype(np.float32))
        rows.append(fleet.uploads())
    sent = np.concatenate(rows)[-count:]

    def score(directions: Rows) -> float:
        return float(fleet.energies(directions, fleet.round).max(1).mean())

    return Result(
        name=f"component analysis, {per_coordinate:g} d vectors",
        attacker=CRAFTS,
        success=score(analyse(sent).directions),
        # Few vectors separate into single updates, which lie in some units more than in others without any analysis.
        chance=max(score(analyse(sent, rng=rng).directions), score((sent - sent.mean(0))[-DEVICES:])),
        unit="share",
        margin=0.1,
        keys=lifetime,
        devices=DEVICES,
        note=f"largest share of a component in one of {network.hidden} units; d = {network.length}",
    )


def independence(lab: Lab, mode: str) -> list[Result]:
    """Return the results under a mask that mixes coordinates; under the others coordinates are components already."""
    if lab.keeps(mode) != "lengths" or not fleet_sizes(lab):
        return []
    counts = QUICK_VECTORS if lab.quick else VECTORS
    return [purity(lab, mode, keys, count) for keys in LIFETIMES for count in counts]


ATTACKS: Final = (
    Attack("structure, active", "Boenisch et al. 2023 (malicious models); Hyvarinen and Oja 2000", CRAFTS, active),
    Attack("structure, passive", "Hyvarinen and Oja 2000 (components)", FOLLOWS, passive),
)
COMPONENT_ANALYSIS: Final = Attack("component analysis", "Hyvarinen and Oja 2000", CRAFTS, independence)
