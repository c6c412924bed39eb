"""Membership of an image in a device's training data, from the cosine of its gradient and the update.

Nasr et al., "Comprehensive Privacy Analysis of Deep Learning" (2019), reduced to the strongest single feature
that a cosine-computing server has; Shokri et al. (2017) for the question.
"""

from __future__ import annotations

from typing import Final

import numpy as np

from shoal.task.manifest import LocalTraining
from shoal_lab.bench.attacks.base import Attack, Result, auc, cosine
from shoal_lab.bench.attacks.lab import Lab

WHO: Final = "aggregator with the clear model and candidate images with labels"
SAMPLES: Final = 40
TRAINING: Final = LocalTraining(epochs=3, batch_size=20, lr=0.1)


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the mean AUC over devices of 40 images, three local epochs each, against as many other images."""
    scores = []
    for device in range(lab.trials(24, 12)):
        both = lab.pick(f"membership {device}", 2 * SAMPLES)
        members = both.rows(np.arange(SAMPLES))
        seen = lab.masked(lab.update(members, TRAINING, seed=device), mode, round_=1 + device)
        near = [cosine(seen, -lab.gradient(both.rows(np.array([i])))) for i in range(2 * SAMPLES)]
        scores.append(auc(near[:SAMPLES], near[SAMPLES:]))
    return [
        Result(
            name="membership of an image",
            attacker=WHO,
            success=float(np.mean(scores)),
            chance=0.5,
            unit="AUC",
            margin=0.1,
        )
    ]


ATTACK: Final = Attack("membership", "Nasr et al. 2019; Shokri et al. 2017", WHO, run)
