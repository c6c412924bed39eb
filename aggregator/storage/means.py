"""Means on disk: the aggregator announces a mean for two rounds, and reads it only when it is sealed, compared or stored."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from aggregator.numerics.backend import Backend
from aggregator.storage.vector_log import on_disk
from aggregator.strategies.base import ClientUpdate
from aggregator.strategies.robust import RobustMean
from shoal.protocol.documents import RunPlan
from shoal.transport.stored import STORED_FROM_BYTES
from shoal.types import Float32Vector


class StoredMean(RobustMean):
    """Forms means, and moves long ones to unnamed files.

    Args:
        run: the plan.
        backend: as for `RobustMean`.
        directory: on the disk that takes the means.
    """

    def __init__(self, run: RunPlan, backend: Backend | None, directory: Path) -> None:
        super().__init__(run, backend)
        self._directory = directory

    def __call__(self, contributions: list[ClientUpdate], weighting: str, cap: float = 0.0) -> Float32Vector:
        """Return the mean update, (d,) float32, read-only if it is long."""
        mean = super().__call__(contributions, weighting, cap)
        if (
            not isinstance(mean, np.ndarray) or mean.nbytes < STORED_FROM_BYTES
        ):  # else it may be that of several workers
            return mean
        stored = on_disk([mean.data], self._directory)
        return mean if stored is None else np.frombuffer(stored, np.float32)
