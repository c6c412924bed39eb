"""The clear position of each masked coordinate, by matching its path over rounds to the paths of a shadow run.

All rounds use one key, so coordinate i is the same in every round; and runs from one origin on similar data behave alike. A
linkage attack as on pseudonymised series: Narayanan and Shmatikov, "Robust De-anonymization of Large Sparse Datasets" (2008),
with the shadow run as the auxiliary information.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal_lab.bench.attacks.base import Attack, Result
from shoal_lab.bench.attacks.lab import Lab
from shoal_lab.bench.attacks.rounds import DEVICES, ROUNDS, masked_run, shadow_run

WHO: Final = "aggregator with the clear initial model and data of the same kind, to imitate the run"
MOST: Final = 1200
"""Coordinates that are looked for, at most: those of the last layer and a sample of the others."""
TIMES_CHANCE: Final = 10
"""Threshold of success: this many times chance is not reached by luck with several hundred coordinates."""
_CHUNK: Final = 256


def paths(values: NDArray[np.float32], scale: NDArray[np.float64], *, signed: bool) -> NDArray[np.float64]:
    """Return each coordinate's mean over the devices in every round, (d, rounds), over ``scale`` (rounds,).

    Unless ``signed``, a path's sign is chosen so that its longest step is positive.
    """
    path: NDArray[np.float64] = values.mean(1, dtype=np.float64).T / scale
    if signed:
        return path
    longest = path[np.arange(len(path)), np.abs(path).argmax(1)]
    flipped: NDArray[np.float64] = path * np.where(longest < 0, -1.0, 1.0)[:, None]
    return flipped


def closest(paths_seen: NDArray[np.float64], paths_known: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return for each path (n, rounds) the nearest of the known ones (d, rounds), (n,), int64."""
    lengths = (paths_known**2).sum(1)
    found = [
        (lengths - 2 * paths_seen[at : at + _CHUNK] @ paths_known.T).argmin(1)
        for at in range(0, len(paths_seen), _CHUNK)
    ]
    return np.concatenate(found)


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the shares of the last layer's coordinates and of the others' whose place is found."""
    places, signed = lab.places(mode), lab.keeps(mode) != "magnitudes"
    moves = np.abs(shadow_run(lab)).max((0, 1)) > 0
    last = lab.layers >= lab.layers.max() - 1
    groups = {"last layer": np.flatnonzero(last & moves), "first layer": np.flatnonzero(~last & moves)}
    rng = lab.rng("shadow matching")
    results = []
    for rounds in (1, ROUNDS):
        known, seen = shadow_run(lab)[:rounds], masked_run(lab, mode)[:rounds]
        scale = known.mean(1, dtype=np.float64).std(1)
        known_paths, seen_paths = paths(known, scale, signed=signed), paths(seen, scale, signed=signed)
        for name, wanted in groups.items():
            chosen = wanted if len(wanted) <= MOST else rng.choice(wanted, MOST, replace=False)
            rows = np.flatnonzero(np.isin(places, chosen)) if (places >= 0).all() else chosen
            found = closest(seen_paths[rows], known_paths)
            results.append(
                Result(
                    name=f"shadow matching, {rounds} round{'s' * (rounds > 1)}, {name}",
                    attacker=WHO,
                    success=float((found == places[rows]).mean()),
                    chance=1 / lab.length,
                    unit="share",
                    margin=TIMES_CHANCE / lab.length,
                    note="coordinates whose place is found exactly",
                    devices=DEVICES,
                )
            )
    return results


ATTACK: Final = Attack("shadow matching", "Narayanan and Shmatikov 2008 (linking by auxiliary series)", WHO, run)
