"""What norms and dot products tell, which no mask changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from edge_client.learning.norm_noise import noise_factor
from edge_client.learning.update import LOSS_DECIMALS
from shoal_lab.bench.attacks.lab import CLASSES, ONE_EPOCH, ONE_STEP, Attack, Images, Lab, Result
from shoal_lab.bench.attacks.places import fleet_run

SKEWED: Final = "aggregator with the clear initial model and data of the same kind; each device has mostly one class"
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
    return np.asarray(matrix @ matrix.T, np.float64)


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


def gram_matching(lab: Lab, mode: str) -> list[Result]:
    """Return the share of ten devices whose dominant class is named from dot products, over fleets with a key each.

    The attacker trains one shadow device for each class and looks for the assignment of devices to classes under which the two
    Gram matrices agree best: a quadratic assignment, solved by swaps from random starts. Graph matching as in Pedarsani and
    Grossglauser, "On the Privacy of Anonymized Networks" (2011), with cosines for edges.
    """
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
            attacker=SKEWED,
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
    return np.asarray(np.mean(grams, axis=0), np.float64)


HAS_LIST: Final = "aggregator with the clear model and a list that the true data is on"
HAS_SETS: Final = "aggregator with the clear model, the batch order (its seed is in the plan) and a list of data sets"
BLUR: Final = 0.01
"""The run's norm_noise where one is attacked."""

SETS: Final = 40
SET_SAMPLES: Final = 60
ASKED: Final = 100

Norms = NDArray[np.float64]


def nearest(norms: Norms, seen: Norms) -> int:
    """Return which candidate's ``norms`` (n, rounds) are nearest to those ``seen`` (rounds,), relative to their size."""
    return int((np.log(seen / norms) ** 2).sum(1).argmin())


def identification(lab: Lab, mode: str) -> list[Result]:
    """Return how often the one image of a one-step update, and the data set of local epochs, is named by the update's norm.

    The attacker computes every candidate's update and takes the one whose norm is nearest. A guess-and-check attack on a
    distance-preserving transform: Kargupta et al., "Random-Data Perturbation Techniques and Privacy-Preserving Data Mining"
    (2005) for the family. Against norm noise (`norm_noise`) it can wait for more rounds, or compare the reported loss instead.
    """
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
        result(f"which of {count} images, by norm", HAS_LIST, by_norm(singles, [images], some, 0.0), count),
        result(f"the same, norm noise of {BLUR:.0%}", HAS_LIST, by_norm(singles, [images], every, BLUR), count),
        result("the same, by the loss beside it", HAS_LIST, _by_loss(losses), count),
        result(f"which of {SETS} data sets, by norm", HAS_SETS, by_norm(sets[:, :1], rounds[:1], all_sets, 0.0), SETS),
        result(
            f"data sets, norm noise of {BLUR:.0%}", HAS_SETS, by_norm(sets[:, :1], rounds[:1], all_sets, BLUR), SETS
        ),
        result(f"data sets, blurred, {len(rounds)} rounds", HAS_SETS, by_norm(sets, rounds, all_sets, BLUR), SETS),
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


ATTACKS: Final = (
    Attack("dot products", "Pedarsani and Grossglauser 2011 (graph matching)", SKEWED, gram_matching),
    Attack("identification by norm", "Kargupta et al. 2005 (guess and check)", HAS_LIST, identification),
)
