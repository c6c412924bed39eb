"""Norm noise: a random factor near 1 on every update, so that its length does not single out the data behind it.

No mask changes a norm, and an aggregator that can list what the data may be compares lengths (Kargupta et al., "Random-Data
Perturbation Techniques and Privacy-Preserving Data Mining", 2005, for the family). The factor is 1 + blur z with z standard
normal, clipped at CLIP: its mean is 1 exactly, since the clipped normal is symmetric, so that a mean of blurred updates has
the expectation of the true one; directions, and with them all cosines, stay what they are.
"""

from __future__ import annotations

import random
from typing import Final, Protocol

from shoal.limits import MAX_NORM_NOISE

CLIP: Final = 4.0
"""Standard deviations; one draw in 16,000 is beyond, and 1 - CLIP MAX_NORM_NOISE is still positive."""

assert CLIP * MAX_NORM_NOISE < 1


class Normal(Protocol):
    """Draws from a normal distribution; a `random.Random` is one."""

    def normalvariate(self, mu: float = 0.0, sigma: float = 1.0) -> float:
        """Return one draw."""


SYSTEM: Final = random.SystemRandom()
"""The operating system's random source (os.urandom): the run's seed, which the aggregator knows, plays no part."""


def noise_factor(blur: float, source: Normal = SYSTEM) -> float:
    """Return the factor for one update: 1 where ``blur`` is 0, else of mean 1 and standard deviation ``blur``.

    Args:
        blur: relative standard deviation, 0 to MAX_NORM_NOISE.
        source: where the draw comes from.
    """
    if not blur:
        return 1.0
    return 1.0 + blur * min(CLIP, max(-CLIP, source.normalvariate()))
