"""The histogram of an image's grey levels, from the set of values, which a permutation does not hide.

The first layer's gradient of one image is g_j x_i, so each unit's values are the pixels' levels times one factor. Levels are
multiples of 1/16 or 1/255, so the right factor is the one that makes most values whole levels. The structure is that of Phong et
al. (2018), without positions.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal_lab.bench.attacks.base import Attack, Result
from shoal_lab.bench.attacks.lab import Lab

WHO: Final = "aggregator that knows that the update is one step on one image, and how finely pixels are graded"
SCALES: Final = 24
"""Most repeated values that are tried as a unit's full level."""
BEST: Final = 6
TOLERANCE: Final = 2e-5


def levels_of(lab: Lab) -> int:
    """Return the number of grey levels above black in the images."""
    return 16 if lab.name == "digits" else 255


def histogram(values: NDArray[np.float32], levels: int) -> NDArray[np.float64]:
    """Return the share of each level from 1 to ``levels``, (levels,), read from a gradient's values in any order."""
    size = np.abs(values[values != 0]).astype(np.float64)
    repeated, counts = np.unique(size.astype(np.float32), return_counts=True)
    # Fully white pixels repeat the value of the highest level, so frequent values are good guesses of it.
    likely = repeated[np.argsort(-counts, kind="stable")[:SCALES]].astype(np.float64)
    tried = []
    for value in likely:
        for level in range(max(1, levels - 15), levels + 1):
            steps = size * level / value
            whole = np.rint(steps)
            fits = (np.abs(steps - whole) < TOLERANCE * whole) & (whole >= 1) & (whole <= levels)
            tried.append((int(fits.sum()), np.bincount(whole[fits].astype(int), minlength=levels + 1)[1:]))
    tried.sort(key=lambda one: -one[0])
    total = np.sum([found for _, found in tried[:BEST]], axis=0).astype(np.float64)
    return np.asarray(total / max(total.sum(), 1.0), np.float64)


def true_histogram(x: NDArray[np.float32], levels: int) -> NDArray[np.float64]:
    """Return the share of each level from 1 to ``levels`` among the pixels of ``x`` that are not black."""
    counts = np.bincount(np.rint(x.ravel() * levels).astype(int), minlength=levels + 1)[1:].astype(np.float64)
    return np.asarray(counts / counts.sum(), np.float64)


def run(lab: Lab, mode: str) -> list[Result]:
    """Return how much of the histogram of levels is right, over images; chance is the mean histogram."""
    levels, got, guessed = levels_of(lab), [], []
    usual = true_histogram(lab.public.x, levels)
    for trial in range(lab.trials(12, 6)):
        image = lab.pick(f"pixel values {trial}", 1)
        truth = true_histogram(image.x, levels)
        found = histogram(lab.masked(lab.gradient(image), mode, round_=1 + trial % 6), levels)
        got.append(np.minimum(found, truth).sum())
        guessed.append(np.minimum(usual, truth).sum())
    return [
        Result(
            name="grey levels of an image",
            attacker=WHO,
            success=float(np.mean(got)),
            chance=float(np.mean(guessed)),
            unit="share",
            margin=0.1,
            note="overlap of histograms; chance is the usual histogram",
        )
    ]


ATTACK: Final = Attack("value multiset", "Phong et al. 2018, without places", WHO, run)
