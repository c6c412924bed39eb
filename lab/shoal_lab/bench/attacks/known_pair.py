"""The mask from one vector that is known both clear and masked: a known-plaintext attack on a permutation.

A permutation only moves values, and random floats hardly repeat, so every value is searched among the masked ones. With signs,
absolute values are compared. The mapping then opens every other vector under the key.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.types import Float32Vector
from shoal_lab.bench.attacks.base import Attack, Result, cosine
from shoal_lab.bench.attacks.lab import ONE_EPOCH, Keeps, Lab

WHO: Final = (
    "aggregator that gets hold of one clear vector and its masked form, here an origin, which the protocol never sends"
)


def read_map(
    clear: Float32Vector, masked: Float32Vector, keeps: Keeps
) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    """Return (places, signs), each (d,): masked coordinate i is taken to be signs[i] times clear coordinate places[i].

    Ranks are matched (of absolute values if the mode changes signs), so rounding errors in either vector do no harm.
    """
    a, b = (np.abs(clear), np.abs(masked)) if keeps == "magnitudes" else (clear, masked)
    places = np.empty(clear.size, np.int64)
    places[np.argsort(b, kind="stable")] = np.argsort(a, kind="stable")
    signs = np.ones(clear.size, np.float32)
    if keeps == "magnitudes":
        signs = np.where((clear[places] < 0) == (masked < 0), 1.0, -1.0).astype(np.float32)
    return places, signs


def undo(masked: Float32Vector, places: NDArray[np.int64], signs: NDArray[np.float32]) -> Float32Vector:
    """Return ``masked`` (d,) with each coordinate moved to its place in the map of `read_map`."""
    clear = np.zeros_like(masked)
    clear[places] = masked * signs
    return clear


def share_placed(lab: Lab, mode: str, places: NDArray[np.int64]) -> float:
    """Return the share of masked coordinates whose clear place is right; 0 if the mode mixes coordinates."""
    return float((places == lab.places(mode)).mean())


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the share of the coordinates whose place is found, and how well another device's update is opened."""
    places, signs = read_map(lab.origin, lab.masked(lab.origin, mode), lab.keeps(mode))
    update = lab.update(lab.pick("known pair", 80), ONE_EPOCH)
    opened = undo(lab.masked(update, mode), places, signs)
    apart = cosine(lab.update(lab.pick("known pair, the attacker's", 80, lab.public), ONE_EPOCH), update)
    return [
        Result(
            name="known pair: places of coordinates",
            attacker=WHO,
            success=share_placed(lab, mode, places),
            chance=1 / lab.length,
            unit="share",
            margin=0.01,
        ),
        Result(
            name="known pair: another update opened",
            attacker=WHO,
            success=cosine(opened, update),
            chance=apart,
            unit="cosine",
            margin=0.05,
            note="chance is the attacker's own training from the same origin",
        ),
    ]


ATTACK: Final = Attack("known pair", "known-plaintext attack; Shoal's design, rule 1", WHO, run)
