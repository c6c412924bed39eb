"""The mask from one clear mean, whose masked form the aggregator computed itself.

Two successive clear models give a clear mean, which for permutations is a known pair (see `known_pair`). Any mask preserves dot
products, so under every mode an update's component along known vectors follows by projection; with enough known vectors this
is the whole update. Liu et al., "An Attacker's View of Distance Preserving Maps for Privacy Preserving Data Mining" (2006), for
known samples under rotations.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.types import Float32Vector
from shoal_lab.bench.attacks.base import Attack, Result, cosine
from shoal_lab.bench.attacks.known_pair import read_map, undo
from shoal_lab.bench.attacks.lab import ONE_EPOCH, Lab

WHO: Final = "aggregator that gets two successive clear models, as any device has them"
WHO_MANY: Final = "aggregator that knows the clear updates of some devices, without their key"
DEVICES: Final = 10
SAMPLES: Final = 80


def updates(lab: Lab) -> list[Float32Vector]:
    """Return the clear updates (d,) of ten devices in one round."""
    return lab.once(
        "known mean",
        lambda: [lab.update(lab.pick(f"known mean {i}", SAMPLES), ONE_EPOCH, seed=i) for i in range(DEVICES)],
    )


def project(
    known: list[Float32Vector], known_masked: list[Float32Vector], masked: Float32Vector
) -> NDArray[np.float64]:
    """Return the vector (d,) in the span of the ``known`` clear ones that is nearest to the unmasked ``masked`` (d,)."""
    b = np.stack(known_masked).astype(np.float64)
    weights = np.linalg.lstsq(b.T, masked.astype(np.float64), rcond=None)[0]
    return np.asarray(weights @ np.stack(known).astype(np.float64), np.float64)


def run(lab: Lab, mode: str) -> list[Result]:
    """Return how well a device's update is opened with one clear mean, and with the clear updates of nine others."""
    clear = updates(lab)
    masked = [lab.masked(u, mode) for u in clear]
    after = lab.origin + np.stack(clear).mean(0)
    mean, mean_masked = after - lab.origin, np.stack(masked).mean(0)
    keeps, target = lab.keeps(mode), clear[3]
    if keeps == "lengths":
        opened = project([mean], [mean_masked], masked[3]).astype(np.float32)
    else:
        opened = undo(masked[3], *read_map(mean, mean_masked, keeps))
    others = [i for i in range(DEVICES) if i != 3]
    many = project([clear[i] for i in others], [masked[i] for i in others], masked[3])
    best_single = max(cosine(clear[i], target) for i in others)
    return [
        Result(
            name="known mean: an update opened",
            attacker=WHO,
            success=cosine(opened, target),
            chance=cosine(mean, target),
            unit="cosine",
            margin=0.02,
            note="chance is the mean itself",
            devices=DEVICES,
        ),
        Result(
            name="nine updates known: the tenth projected",
            attacker=WHO_MANY,
            success=cosine(many, target),
            chance=max(best_single, cosine(np.mean([clear[i] for i in others], axis=0), target)),
            unit="cosine",
            margin=0.02,
            note="dot products alone: the same under every mask; chance is the mean of the nine",
            devices=DEVICES,
        ),
    ]


ATTACK: Final = Attack("known mean", "Liu et al. 2006 (known samples); known plaintext", WHO, run)
