"""cfl-noise: the chance of a right bipartition (Sattler et al., section II, Fig. 3, Eqs 30 and 31).

k true gradients in d = 100 dimensions and the noise of m = 3k devices are drawn from normal distributions. The paper leaves two
details open. Here the true gradients are centred, since they add up to zero at a stationary point (its Eq. 11), and the noise of
a draw is scaled so that the largest relative noise of a device (Eq. 16) equals gamma. There are no devices and no training; the
bipartition is the aggregator's own. Counted are draws with a positive separation gap, as in the paper's Fig. 3, and draws whose
bipartition cuts no group, which is all that CFL needs.
"""

from __future__ import annotations

import math
import time
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.gap import overlap
from shoal.errors import UsageError
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study
from shoal_lab.experiments.studies.watch import gap_of

DEVICES_PER_GROUP: Final = 3
GROUPS: Final = {"default": (2, 3, 5, 10, 20), "paper": (2, 3, 4, 5, 6, 8, 10, 12, 15, 20, 30, 50)}
GAMMAS: Final = {
    "default": (0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, 3.0),
    "paper": tuple(round(0.1 * i, 1) for i in range(1, 31)),
}


def draw(k: int, gamma: float, dimensions: int, rng: np.random.Generator) -> tuple[NDArray[np.float32], list[int]]:
    """Return the gradients of 3k devices, (3k, d) float32, and their groups.

    Args:
        k: groups.
        gamma: the largest relative noise of a device (cfl Eq. 16).
        dimensions: d.
        rng: draws.
    """
    true = rng.standard_normal((k, dimensions))
    true -= true.mean(0)
    groups = np.repeat(np.arange(k), DEVICES_PER_GROUP)
    noise = rng.standard_normal((len(groups), dimensions))
    relative = np.linalg.norm(noise, axis=1) / np.linalg.norm(true[groups], axis=1)
    noise *= gamma / relative.max()
    return (true[groups] + noise).astype(np.float32), groups.tolist()


def chance(k: int, gamma: float, trials: int, dimensions: int, seed: int) -> tuple[float, float]:
    """Return the shares of ``trials`` draws with a positive gap, and with a bipartition that cuts no group."""
    # A stream for each point, so that a point's result does not depend on the grid.
    rng = np.random.default_rng([seed, k, round(gamma * 1000)])
    found = []
    for _ in range(trials):
        rows, groups = draw(k, gamma, dimensions, rng)
        found.append(gap_of(list(rows), groups))
    return float(np.mean([g.gap > 0 for g in found])), float(np.mean([g.right for g in found]))


def guaranteed(k: int, gamma: float) -> bool:
    """Return whether Theorem 1 guarantees a right bipartition if every device has relative noise ``gamma``."""
    if gamma >= 1.0:
        return False
    alike = overlap(gamma, gamma)
    return alike - cross_max_bound(k, alike) > 0


def cross_max_bound(k: int, alike: float) -> float:
    """Return the upper bound of cfl Eq. 19 on the similarity across the best bipartition of k groups with an overlap."""
    angle = math.pi / (k - 1)
    if alike < math.cos(angle):
        return 1.0
    return math.cos(angle) * alike + math.sin(angle) * math.sqrt(1.0 - alike**2)


def run(study: Study, options: Options, progress: Progress) -> Result:
    """Run ``cfl-noise``."""
    trials, dimensions = options.values["trials"], options.values["dimensions"]
    if trials < 1 or dimensions < 2:
        raise UsageError(f"{trials} trials in {dimensions} dimensions")
    points = [(k, gamma) for k in GROUPS[options.grid] for gamma in GAMMAS[options.grid]]
    history: list[dict[str, Any]] = []
    begin_s = time.process_time()
    for k, gamma in points:
        positive, right = chance(k, gamma, trials, dimensions, options.seed)
        history.append({"k": k, "gamma": gamma, "chance": positive, "right": right, "guaranteed": guaranteed(k, gamma)})
        progress.round("cfl", len(history), len(points), history[-1])
    beyond = [row for row in history if row["k"] >= 10 and row["gamma"] >= 1.0]
    return study.result(
        options,
        {
            "devices": f"{DEVICES_PER_GROUP} k",
            "gamma": "of the noisiest device",
            "true_gradients": "normal, centred",
            "grid": options.grid,
            "mask": "nothing leaves a device",
        },
        accuracy=None,
        clusters=2,
        cpu_seconds_per_round=time.process_time() - begin_s,
        history=history,
        extra={
            "gamma_limit": {str(k): largest_gamma(history, k) for k in GROUPS[options.grid]},
            "guaranteed_wrong": sum(row["guaranteed"] and row["right"] < 1.0 for row in history),
            "least_chance_k10_gamma1": min((row["chance"] for row in beyond if row["gamma"] == 1.0), default=None),
        },
    )


def largest_gamma(history: list[dict[str, Any]], k: int) -> float | None:
    """Return the largest gamma up to which at least 95% of the draws with ``k`` groups have a positive gap."""
    limit = None
    for row in sorted((r for r in history if r["k"] == k), key=lambda r: float(r["gamma"])):
        if row["chance"] < 0.95:
            break
        limit = float(row["gamma"])
    return limit
