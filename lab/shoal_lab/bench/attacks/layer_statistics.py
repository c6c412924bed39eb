"""The tensor of each masked coordinate, from the spread of its values over devices and rounds.

The attacker trains a classifier on a shadow run, where the answer is known, and applies it to the masked coordinates: Shokri
et al., "Membership Inference Attacks against Machine Learning Models" (2017), for shadow training.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal_lab.bench.attacks.base import Attack, Result, balanced_accuracy
from shoal_lab.bench.attacks.lab import Lab
from shoal_lab.bench.attacks.rounds import DEVICES, ROUNDS, masked_run, shadow_run

WHO: Final = "aggregator with the clear initial model and data of the same kind, to imitate the run"
PER_LAYER: Final = 800
"""Coordinates of a tensor to learn from, at most."""
FLOOR: Final = 1e-12


def features(values: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return features of each coordinate, (d, features), from updates (rounds, devices, d); signs are left out."""
    size = np.abs(values).astype(np.float64) + FLOOR
    mean = np.abs(values.mean(1, dtype=np.float64)) + FLOOR
    spread = values.std((0, 1), dtype=np.float64) + FLOOR
    return np.stack(
        [
            np.log(size.mean((0, 1))),
            np.log(size.max((0, 1))),
            np.log(mean.mean(0)),
            (values == 0).mean((0, 1)),
            np.log(size.mean((0, 1))) - np.log(spread),
            np.log(mean[0]),
            np.log(mean[-1]),
        ],
        1,
    )


def learned(lab: Lab, rounds: int) -> Any:
    """Return the classifier of the shadow run's first ``rounds``."""
    from sklearn.ensemble import RandomForestClassifier

    def fit() -> Any:
        rng = lab.rng("layer statistics")
        which = [np.flatnonzero(lab.layers == i) for i in range(lab.layers.max() + 1)]
        rows = np.concatenate([rng.choice(w, min(len(w), PER_LAYER), replace=False) for w in which])
        forest = RandomForestClassifier(60, class_weight="balanced", min_samples_leaf=2, random_state=0, n_jobs=1)
        return forest.fit(features(shadow_run(lab)[:rounds])[rows], lab.layers[rows])

    return lab.once(("layers learned", rounds), fit)


def run(lab: Lab, mode: str) -> list[Result]:
    """Return the balanced accuracy over the tensors, from one round and from all under one key."""
    truth = lab.layer_of(mode)
    results = []
    for rounds in (1, ROUNDS):
        guess = learned(lab, rounds).predict(features(masked_run(lab, mode)[:rounds]))
        note = "judged by the tensor that a coordinate draws most on"
        results.append(
            Result(
                name=f"layer of a coordinate, {rounds} round{'s' * (rounds > 1)}",
                attacker=WHO,
                success=balanced_accuracy(guess, truth),
                chance=1 / len(np.unique(truth)),
                unit="accuracy",
                margin=0.1,
                note=note if lab.keeps(mode) == "lengths" else "",
                devices=DEVICES,
            )
        )
    return results


ATTACK: Final = Attack("layer from statistics", "Shokri et al. 2017 (shadow training)", WHO, run)
