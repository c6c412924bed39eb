"""Attacks on the mean: what false devices upload in place of their update, or train on.

An attacker is a member of the fleet: it knows the round's mask, and sees what every device sees. "A little is enough" (ALIE)
is given more than that, the other devices' updates.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from aggregator.strategies.base import ClientUpdate, norm_of
from crypto.mask.masking import mask, unmask
from shoal.protocol.recipe import DEFAULTS
from shoal.simulation.engine.workforce import Workforce
from shoal.types import Float32Vector, MaskedVector

BOOST: Final = 10.0
"""Factor of boosted updates; the relative norm limit is ten median norms."""
CAP: Final = 1.9
"""Length of a stretched backdoor's update in median norms: the filter shortens what is longer than 2."""
ALIE_DEVIATIONS: Final = 1.2
"""Standard deviations by which ALIE shifts each coordinate of the mean. With three false updates of ten the paper's formula
gives 0.4 for a median; 1.2 is what the published attacks on neural networks use."""

Change = Callable[[list[ClientUpdate], list[ClientUpdate], Workforce], list[ClientUpdate]]
"""Turns the attackers' uploads into false ones, given the honest ones; all with updates, which are masked."""


@dataclass(frozen=True, slots=True)
class Attack:
    """What attackers do.

    Attributes:
        text: a description in one line.
        labels: whether they train on flipped labels.
        painted: whether a part of the images that they train on has the trigger and the label of a backdoor.
        change: replaces their uploads; None leaves these as they are.
        strategy: the algorithm under attack; empty for the caller's choice.
        attackers: their number; devices: that of the fleet, with them.
    """

    text: str
    labels: bool = False
    painted: bool = False
    change: Change | None = None
    strategy: str = ""
    attackers: int = 3
    devices: int = 10


def tamper(
    change: Change, names: tuple[str, ...], given: list[ClientUpdate], workforce: Workforce
) -> list[ClientUpdate]:
    """Return a round's uploads with those of ``names`` changed; uploads without an update stay."""
    false = [c for c in given if c.device in names and c.vector is not None]
    honest = [c for c in given if c.device not in names and c.vector is not None]
    if not false or not honest:
        return given
    changed = {c.device: c for c in change(false, honest, workforce)}
    return [changed.get(c.device, c) if c.vector is not None else c for c in given]


def with_vector(upload: ClientUpdate, vector: Float32Vector) -> ClientUpdate:
    """Return the upload with another masked update (d,)."""
    vector = np.ascontiguousarray(vector, np.float32)
    return dataclasses.replace(upload, vector=vector, norm=norm_of(vector))


def _times(factor: float) -> Change:
    return lambda false, _honest, _workforce: [with_vector(c, c.row * np.float32(factor)) for c in false]


def _long(factor: float) -> Change:
    """Make updates so many times as long as the median of the honest ones."""

    def changed(false: list[ClientUpdate], honest: list[ClientUpdate], _workforce: Workforce) -> list[ClientUpdate]:
        usual = float(np.median([c.norm for c in honest]))
        return [with_vector(c, c.row * np.float32(factor * usual / c.norm)) if c.norm else c for c in false]

    return changed


def _noise(false: list[ClientUpdate], _honest: list[ClientUpdate], workforce: Workforce) -> list[ClientUpdate]:
    """Normal noise as long as the update. A mask turns noise into noise, so there is none to apply."""
    found = []
    for c in false:
        drawn = np.random.default_rng([workforce.run.seed, c.round, workforce.place_of[c.device]])
        noise = drawn.standard_normal(len(c.row), np.float32)
        found.append(with_vector(c, noise * np.float32(c.norm / norm_of(noise))))
    return found


def _alie(false: list[ClientUpdate], honest: list[ClientUpdate], workforce: Workforce) -> list[ClientUpdate]:
    """Baruch et al. (2019): the honest mean less some standard deviations of each coordinate."""
    key = workforce.models.mask
    rows = [c.row if key is None else unmask(MaskedVector(c.row, key.key_id), key) for c in honest]
    clear = np.stack(rows)
    little = (clear.mean(axis=0) - ALIE_DEVIATIONS * clear.std(axis=0)).astype(np.float32)
    sent = little if key is None else mask(little, key).values
    return [with_vector(c, sent) for c in false]


def _false_counts(false: list[ClientUpdate], honest: list[ClientUpdate], workforce: Workforce) -> list[ClientUpdate]:
    flipped = _times(-1.0)(false, honest, workforce)
    return [dataclasses.replace(c, samples=workforce.run.recipe.max_samples) for c in flipped]


def _false_losses(false: list[ClientUpdate], honest: list[ClientUpdate], workforce: Workforce) -> list[ClientUpdate]:
    """Claim the model that most honest devices chose, with a loss of 0, and send a reversed update."""
    favourite = Counter(c.model for c in honest).most_common(1)[0][0]
    flipped = _times(-1.0)(false, honest, workforce)
    return [dataclasses.replace(c, model=favourite, loss=0.0, margins=tuple(-m for m in c.margins)) for c in flipped]


def _backdoors() -> dict[str, Attack]:
    """Return the backdoors by name: no attacker, or one to three of twenty, whose updates are of usual length or stretched."""

    def backdoor(attackers: int, text: str, change: Change | None = None) -> Attack:
        return Attack(text, painted=True, change=change, attackers=attackers, devices=20)

    found = {"backdoor-0": backdoor(0, "all twenty devices are honest")}
    for name, factor in (("backdoor", 1.0), ("backdoor-cap", CAP)):
        for count in (1, 2, 3):
            text = f"{count} of twenty train on images with a trigger, and send an update of {factor:g} median norms"
            found[f"{name}-{count}"] = backdoor(count, text, _long(factor))
    return found


NONE: Final = "none"
ABSENT: Final = "absent"
ATTACKS: Final[Mapping[str, Attack]] = MappingProxyType(
    {
        ABSENT: Attack("the attackers are not in the fleet"),
        NONE: Attack("all ten devices are honest", attackers=0),
        "label-flip": Attack("trains on label 9 - y for y", labels=True),
        "sign-flip": Attack("sends its update reversed", change=_times(-1.0)),
        "boosted": Attack("sends its update times 10", change=_times(BOOST)),
        "boosted-100": Attack("sends its update times 100", change=_times(100.0)),
        "boosted-flip": Attack("sends its update reversed, times 9", change=_times(-0.9 * BOOST)),
        "boosted-labels": Attack(
            "trains on label 9 - y, sends the update times 9", labels=True, change=_times(0.9 * BOOST)
        ),
        "noise": Attack("sends noise as long as its update", change=_noise),
        "alie": Attack("sends the honest mean less 1.2 deviations of each coordinate", change=_alie),
        "false-counts": Attack(
            f"sends its update reversed, with {DEFAULTS.max_samples:,} samples", change=_false_counts
        ),
        "false-losses": Attack(
            "claims a loss of 0 for the honest devices' model and sends a reversed update",
            change=_false_losses,
            strategy="ifca",
        ),
        **_backdoors(),
    }
)
"""Attack by name. The plan's weight cap and the relative norm limit are in force under all of them."""
