"""The number of images of each class in a batch, from the gradient of the last layer's bias.

For softmax and cross-entropy that gradient is mean(p) - counts / n, and p hardly moves with the image in a young model:
Zhao et al., "iDLG: Improved Deep Leakage from Gradients" (2020), for one image; Wainakh et al., "User-Level Label
Leakage from Gradients in Federated Learning" (2022), for counts.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal_lab.bench.attacks.base import Attack, Result
from shoal_lab.bench.attacks.lab import CLASSES, LR, Lab

BATCH: Final = 32
PRESENT: Final = 5
"""Classes that a batch is drawn from, so that guessing the usual mixture is half wrong."""
WHO: Final = "aggregator with the initial model, the model's layout and images of the same kind; it places no mask"


def estimate(gradient: NDArray[np.float32], mean_p: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the counts (classes,) of a batch of 32 read from a gradient (d,) as if it were clear.

    Args:
        gradient: the last ``classes`` coordinates are taken as the last bias's.
        mean_p: shape (classes,), the model's mean output on other images.
    """
    counts = np.clip(BATCH * (mean_p - gradient[-CLASSES:]), 0.0, None)
    total = counts.sum()
    return counts / total * BATCH if total > 0 else np.full(CLASSES, BATCH / CLASSES)


def overlap(guess: NDArray[np.float64], truth: NDArray[np.int64]) -> float:
    """Return the share of a batch's labels that two counts (classes,) have in common."""
    return 1.0 - float(np.abs(np.round(guess) - truth).sum()) / (2 * BATCH)


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the mean overlap over batches of five classes, each under a mask of its own."""
    outputs = lab.backend.predict(lab.origin, lab.public.x).astype(np.float64)
    p = np.exp(outputs - outputs.max(1, keepdims=True))
    mean_p = (p / p.sum(1, keepdims=True)).mean(0)
    rng, got, guessed = lab.rng("label counts"), [], []
    for trial in range(lab.trials(40, 12)):
        classes = rng.choice(CLASSES, PRESENT, replace=False)
        pool = np.flatnonzero(np.isin(lab.private.y, classes))
        batch = lab.private.rows(rng.choice(pool, BATCH, replace=False))
        truth = np.bincount(batch.y, minlength=CLASSES)
        seen = lab.masked(lab.update(batch), mode, round_=1 + trial % 6) / np.float32(-LR)
        got.append(overlap(estimate(seen, mean_p), truth))
        guessed.append(overlap(np.bincount(lab.public.y, minlength=CLASSES) / len(lab.public) * BATCH, truth))
    return [
        Result(
            name="label counts of a batch",
            attacker=WHO,
            success=float(np.mean(got)),
            chance=float(np.mean(guessed)),
            unit="share",
            note="chance guesses the usual mixture of classes",
        )
    ]


ATTACK: Final = Attack("label counts", "Zhao et al. 2020 (iDLG); Wainakh et al. 2022", WHO, run)
