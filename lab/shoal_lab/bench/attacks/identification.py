"""The data of an update among many candidates, by its norm, which no orthonormal mask changes; norm noise (`norm_noise`) does.

The attacker computes every candidate's update and takes the one whose norm is nearest. A guess-and-check attack on a
distance-preserving transform: Kargupta et al., "Random-Data Perturbation Techniques and Privacy-Preserving Data Mining" (2005)
for the family. Against noisy norms the attacker can wait for more rounds, or compare the reported loss instead.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edge_client.learning.norm_noise import noise_factor
from edge_client.learning.update import LOSS_DECIMALS
from shoal_lab.bench.attacks.base import Attack, Result
from shoal_lab.bench.attacks.lab import ONE_EPOCH, ONE_STEP, Lab
from shoal_lab.bench.attacks.rounds import fleet_run

WHO: Final = "aggregator with the clear model and a list that the true data is on"
WHO_SETS: Final = "aggregator with the clear model, the batch order (its seed is in the plan) and a list of data sets"
BLUR: Final = 0.01
"""The run's norm_noise where one is attacked."""

SETS: Final = 40
SET_SAMPLES: Final = 60
ASKED: Final = 100

Norms = NDArray[np.float64]


def nearest(norms: Norms, seen: Norms) -> int:
    """Return which candidate's ``norms`` (n, rounds) are nearest to those ``seen`` (rounds,), relative to their size."""
    return int((np.log(seen / norms) ** 2).sum(1).argmin())


def run(lab: Lab, mode: str) -> list[Result]:
    """Return how often the one image of a one-step update, and the data set of local epochs, is named rightly."""
    count = lab.trials(800, 300)
    images, losses = lab.once("identification", lambda: _images(lab, count))
    rounds = lab.once("identification, sets", lambda: _sets(lab))
    singles = np.stack([_norms(images)], 1)
    sets = np.stack([_norms(r) for r in rounds], 1)
    some, every = range(min(ASKED, count)), range(count)

    def by_norm(candidates: Norms, updates: Sequence[NDArray[np.float32]], asked: Sequence[int], blur: float) -> float:
        source = random.Random(f"{len(updates)} rounds of {len(candidates)}")  # noqa: S311 - a repeatable benchmark
        right = 0
        for i in asked:
            sent = [lab.masked(u[i] * np.float32(noise_factor(blur, source)), mode) for u in updates]
            right += nearest(candidates, _norms(sent)) == i
        return right / len(asked)

    def result(name: str, who: str, success: float, n: int) -> Result:
        return Result(name=name, attacker=who, success=success, chance=1 / n, unit="share")

    all_sets = range(SETS)
    return [
        result(f"which of {count} images, by norm", WHO, by_norm(singles, [images], some, 0.0), count),
        result(f"the same, norm noise of {BLUR:.0%}", WHO, by_norm(singles, [images], every, BLUR), count),
        result("the same, by the loss beside it", WHO, _by_loss(losses), count),
        result(f"which of {SETS} data sets, by norm", WHO_SETS, by_norm(sets[:, :1], rounds[:1], all_sets, 0.0), SETS),
        result(
            f"data sets, norm noise of {BLUR:.0%}", WHO_SETS, by_norm(sets[:, :1], rounds[:1], all_sets, BLUR), SETS
        ),
        result(f"data sets, blurred, {len(rounds)} rounds", WHO_SETS, by_norm(sets, rounds, all_sets, BLUR), SETS),
    ]


def _norms(updates: Sequence[NDArray[np.float32]] | NDArray[np.float32]) -> Norms:
    return np.array([np.linalg.norm(u.astype(np.float64)) for u in updates])


def _images(lab: Lab, count: int) -> tuple[NDArray[np.float32], Norms]:
    """Return (updates (count, d), reported losses (count,)) of one step on one image each."""
    images = lab.pick("identification", count)
    made = [lab.report(images.rows(np.array([i])), ONE_STEP) for i in range(count)]
    return np.stack([u for u, _ in made]), np.array([round(loss, LOSS_DECIMALS) for _, loss in made])


def _sets(lab: Lab) -> list[NDArray[np.float32]]:
    """Return the candidates' updates, (SETS, d), in each round of the lab's fleet."""
    theta, rounds = lab.origin.copy(), []
    for t, moves in enumerate(fleet_run(lab)):
        made = [
            lab.update(lab.pick(f"set {i}", SET_SAMPLES), ONE_EPOCH, theta=theta, seed=1000 * t + i)
            for i in range(SETS)
        ]
        rounds.append(np.stack(made))
        theta = theta + moves.mean(0)
    return rounds


def _by_loss(losses: Norms) -> float:
    """Return how often the reported loss names the image: ties are guessed."""
    return float(np.mean([1 / np.count_nonzero(losses == loss) for loss in losses]))


ATTACK: Final = Attack("identification by norm", "Kargupta et al. 2005 (guess and check)", WHO, run)
