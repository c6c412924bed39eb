"""Norm noise: a random factor near 1 on every update, so that the update's norm does not identify the training data.

A mask does not change the norm, so an aggregator with a list of candidate data sets could compare norms (for this family of
attacks see Kargupta et al., "Random-Data Perturbation Techniques and Privacy-Preserving Data Mining", 2005). The factor is
1 + blur z, with z standard normal and clipped at CLIP. Its mean is exactly 1, since the clipped normal is symmetric, so the
expectation of a mean of updates does not change; neither do directions, and with them cosines.
"""

from __future__ import annotations

import random
from typing import Final, Protocol

from shoal.limits import MAX_NORM_NOISE

CLIP: Final = 4.0
"""Clipping bound in standard deviations: one draw in 16,000 is beyond it, and 1 - CLIP MAX_NORM_NOISE is still positive."""

assert CLIP * MAX_NORM_NOISE < 1


class Normal(Protocol):
    """Draws from a normal distribution; a `random.Random` is one."""

    def normalvariate(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        """Return one draw."""


SYSTEM: Final = random.SystemRandom()
"""The operating system's random source (os.urandom). The run's seed is not used, since the aggregator knows it."""


def noise_factor(blur: float, source: Normal = SYSTEM) -> float:
    """Return the factor for one update: 1 if ``blur`` is 0, else a draw with mean 1 and standard deviation ``blur``.

    Args:
        blur: relative standard deviation, 0 to MAX_NORM_NOISE.
        source: the random source.
    """
    if not blur:
        return 1.0
    return 1.0 + blur * min(CLIP, max(-CLIP, source.normalvariate()))
