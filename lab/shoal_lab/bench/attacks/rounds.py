"""Two runs side by side for the attacks that watch several rounds: the fleet's, and the attacker's shadow of it."""

from __future__ import annotations

from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal_lab.bench.attacks.lab import ONE_EPOCH, Images, Lab

DEVICES: Final = 10
SAMPLES: Final = 80
ROUNDS: Final = 10

Updates = NDArray[np.float32]


def fleet_run(lab: Lab) -> Updates:
    """Return the clear updates of ten devices over the rounds, (rounds, devices, d), from the lab's origin."""
    return lab.once("fleet run", lambda: _run(lab, lab.private, "fleet"))


def shadow_run(lab: Lab) -> Updates:
    """Return the same of the attacker's imitation: the same origin, own data of the same kind."""
    return lab.once("shadow run", lambda: _run(lab, lab.public, "shadow"))


def masked_run(lab: Lab, mode: str) -> Updates:
    """Return the fleet's run as the aggregator has it, all under one key, (rounds, devices, d)."""
    return lab.once(
        ("masked run", mode),
        lambda: np.stack([np.stack([lab.masked(u, mode) for u in one]) for one in fleet_run(lab)]),
    )


def _run(lab: Lab, images: Images, who: str) -> Updates:
    theta, rounds = lab.origin.copy(), []
    parts = [lab.pick(f"{who} {i}", SAMPLES, images) for i in range(DEVICES)]
    for t in range(ROUNDS):
        made = [lab.update(p, ONE_EPOCH, theta=theta, seed=1000 * t + i) for i, p in enumerate(parts)]
        rounds.append(np.stack(made))
        theta = theta + rounds[-1].mean(0)
    return np.stack(rounds)
