"""The dominant class of each device, from dot products alone, which every mode preserves because clustering needs them.

The attacker trains one shadow device for each class and looks for the assignment of devices to classes under which the two
Gram matrices agree best: a quadratic assignment, solved by swaps from random starts. Graph matching as in Pedarsani and
Grossglauser, "On the Privacy of Anonymized Networks" (2011), with cosines for edges.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal_lab.bench.attacks.base import Attack, Result
from shoal_lab.bench.attacks.lab import CLASSES, ONE_EPOCH, Images, Lab

WHO: Final = "aggregator with the clear initial model and data of the same kind; each device has mostly one class"
SAMPLES: Final = 100
DOMINANT: Final = 0.8
SHADOWS: Final = 6
STARTS: Final = 40


def skewed(lab: Lab, images: Images, label: int, what: str) -> Images:
    """Return 100 of ``images``, four fifths of one class."""
    rng = lab.rng(f"{what} {label}")
    own = rng.choice(np.flatnonzero(images.y == label), int(DOMINANT * SAMPLES))
    rest = rng.choice(len(images), SAMPLES - len(own), replace=False)
    return images.rows(np.concatenate([own, rest]))


def products(rows: list[NDArray[np.float32]]) -> NDArray[np.float64]:
    """Return all dot products of vectors (d,)."""
    matrix = np.stack(rows).astype(np.float64)
    gram: NDArray[np.float64] = matrix @ matrix.T
    return gram


def assign(seen: NDArray[np.float64], known: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.int64]:
    """Return p (n,) for which ``known[p][:, p]`` is nearest to ``seen``, both (n, n), among local optima of swaps."""
    best, least = np.arange(len(seen)), np.inf
    for _ in range(STARTS):
        assignment = rng.permutation(len(seen))
        cost = _cost(seen, known, assignment)
        better = True
        while better:
            better = False
            for i in range(len(seen)):
                for j in range(i):
                    other = assignment.copy()
                    other[i], other[j] = other[j], other[i]
                    changed = _cost(seen, known, other)
                    if changed < cost - 1e-15:  # rounding must not make two orders alternate for ever
                        assignment, cost, better = other, changed, True
        if cost < least:
            best, least = assignment, cost
    return best


def _cost(seen: NDArray[np.float64], known: NDArray[np.float64], assignment: NDArray[np.int64]) -> float:
    return float(((seen - known[np.ix_(assignment, assignment)]) ** 2).sum())


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the share of ten devices whose dominant class is named, over fleets with a key each."""
    shadows = lab.once("gram shadows", lambda: _shadows(lab))
    right = []
    for trial in range(lab.trials(20, 10)):
        classes = lab.rng(f"gram {trial}").permutation(CLASSES)
        updates = [
            lab.update(skewed(lab, lab.private, int(c), f"gram {trial}"), ONE_EPOCH, seed=i)
            for i, c in enumerate(classes)
        ]
        seen = products([lab.masked(u, mode, round_=1 + trial) for u in updates])
        right.append((assign(seen, shadows, lab.rng("gram starts")) == classes).mean())
    return [
        Result(
            name="a device's main class, from dot products",
            attacker=WHO,
            success=float(np.mean(right)),
            chance=1 / CLASSES,
            unit="share",
            margin=0.15,
            devices=CLASSES,
        )
    ]


def _shadows(lab: Lab) -> NDArray[np.float64]:
    grams = [
        products(
            [lab.update(skewed(lab, lab.public, c, f"shadow {s}"), ONE_EPOCH, seed=100 + c) for c in range(CLASSES)]
        )
        for s in range(SHADOWS)
    ]
    mean: NDArray[np.float64] = np.mean(grams, axis=0)
    return mean


ATTACK: Final = Attack("dot products", "Pedarsani and Grossglauser 2011 (graph matching)", WHO, run)
