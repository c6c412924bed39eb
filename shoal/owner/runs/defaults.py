"""The defaults of a run, for `shoal-fleet run start`, the simulator, the demo and the benchmarks alike.

A fleet's run, a simulated run and a run of the demo differ from these only where they say so. Local training has its defaults in
`shoal.task.manifest.LocalTraining`, and a strategy's settings in its `StrategySettings`.
"""

from __future__ import annotations

from typing import Final

from shoal import limits
from shoal.limits import DEFAULT_MAX_SAMPLES, DEFAULT_ROBUST, DEFAULT_WEIGHT_CAP

__all__ = [
    "DEFAULT_ALGORITHM",
    "DEFAULT_DEADLINE_S",
    "DEFAULT_EVALUATE_EVERY",
    "DEFAULT_MAX_SAMPLES",
    "DEFAULT_MIN_CONTRIBUTORS",
    "DEFAULT_MODE",
    "DEFAULT_NORM_LIMIT",
    "DEFAULT_NORM_NOISE",
    "DEFAULT_PARTICIPATION",
    "DEFAULT_PRECISION_DOWN",
    "DEFAULT_PRECISION_UP",
    "DEFAULT_QUORUM",
    "DEFAULT_ROBUST",
    "DEFAULT_ROUNDS",
    "DEFAULT_WEIGHTING",
    "DEFAULT_WEIGHT_CAP",
]

DEFAULT_ALGORITHM: Final = "cfl"
"""It needs no number of groups, and where no groups pay it is fedavg."""
DEFAULT_ROUNDS: Final = 50
"""Training rounds."""
DEFAULT_MODE: Final = "rotation"
"""Mask mode."""
DEFAULT_NORM_LIMIT: Final = 1000.0
"""Largest l2 norm of one update."""
DEFAULT_MIN_CONTRIBUTORS: Final = 3
"""Every device can unmask a broadcast mean, and a mean of fewer devices nearly shows one device's update."""
DEFAULT_QUORUM: Final = 0.8
"""Share of the devices asked that closes a round after its deadline."""
DEFAULT_PARTICIPATION: Final = 1.0
"""Share of the devices drawn for a round."""
DEFAULT_DEADLINE_S: Final = 60.0
"""Seconds until a round closes with a quorum."""
DEFAULT_WEIGHTING: Final = "samples"
"""Weights of the devices in a mean."""
DEFAULT_NORM_NOISE: Final = 0.0
"""Relative standard deviation of the random factor on each update; 0 is off."""
DEFAULT_EVALUATE_EVERY: Final = 0
"""Rounds between accuracy reports; 0 reports at the end only."""
DEFAULT_PRECISION_UP: Final = limits.DEFAULT_PRECISION
"""Encoding of devices' updates."""
DEFAULT_PRECISION_DOWN: Final = limits.DEFAULT_PRECISION
"""Encoding of the means that devices receive."""
