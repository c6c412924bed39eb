"""A small population of simulated devices in two groups, and its network."""

import numpy as np

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.trainers.networks import OneHidden

FULL = LocalTraining(epochs=0, steps=5, batch_size=0, lr=0.5)


NETWORK = OneHidden(8, 6, 4)


def population(devices=10, groups=2, uneven=True, seed=0):
    """One linear concept whose labels group g rotates by g; ``groups`` is their number, or the group of each device."""
    places = tuple(i % groups for i in range(devices)) if isinstance(groups, int) else groups
    rng = np.random.default_rng(seed)
    concept = rng.standard_normal((8, 4)) * 2
    shares = [[], [], []]
    for i in range(devices):
        for share, n in zip(shares, (20 + (i * 7 % 11 if uneven else 0), 10, 15), strict=True):
            x = rng.standard_normal((n, 8)).astype(np.float32)
            share.append(Shard(x, ((x @ concept).argmax(1) + places[i]) % 4))
    return Population(*map(tuple, shares), groups=places)
