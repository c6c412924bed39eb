"""Which of many candidates an update was made from, by its norm: no orthonormal mask changes it.

The attacker computes every candidate's update and takes the one whose norm is nearest. A guess-and-check attack on a
distance-preserving transform: Kargupta et al., "Random-Data Perturbation Techniques and Privacy-Preserving Data Mining" (2005)
for the family.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from benchmarks.attacks.base import Attack, Result
from benchmarks.attacks.lab import ONE_EPOCH, Lab

WHO: Final = "aggregator with the clear model and a list that the true data is on"
WHO_SETS: Final = "aggregator with the clear model, the batch order (its seed is in the plan) and a list of data sets"
SETS: Final = 40
SET_SAMPLES: Final = 60


def nearest_norm(norms: NDArray[np.float64], seen: NDArray[np.float32]) -> int:
    """Return which of ``norms`` (n,) is nearest to that of ``seen`` (d,)."""
    return int(np.abs(norms - np.linalg.norm(seen.astype(np.float64))).argmin())


def _norms(updates: list[NDArray[np.float32]]) -> NDArray[np.float64]:
    return np.array([np.linalg.norm(u.astype(np.float64)) for u in updates])


def run(lab: Lab, mode: str) -> list[Result]:
    """Return how often the one image of a one-step update, and the data set of a local epoch, is named rightly."""
    count = lab.trials(800, 300)
    images = lab.pick("identification", count)
    singles = lab.once("identification", lambda: [lab.update(images.rows(np.array([i]))) for i in range(count)])
    sets = lab.once(
        "identification, sets",
        lambda: [lab.update(lab.pick(f"set {i}", SET_SAMPLES), ONE_EPOCH, seed=i) for i in range(SETS)],
    )
    results = []
    for name, who, updates in (
        (f"which of {count} images, by norm", WHO, singles),
        (f"which of {SETS} data sets, by norm", WHO_SETS, sets),
    ):
        norms, asked = _norms(updates), range(min(100, len(updates)))
        right = [nearest_norm(norms, lab.masked(updates[i], mode)) == i for i in asked]
        results.append(Result(name, who, float(np.mean(right)), 1 / len(updates), "share"))
    return results


ATTACK: Final = Attack("identification by norm", "Kargupta et al. 2005 (guess and check)", WHO, run)
