"""A device's statistics for federated standardisation, and the scale that follows from the fleet's mean of them.

A value x with the declared bounds a and b becomes u = (2 x - a - b) / (b - a), clipped to [-1, 1]. The statistics are a vector of
the model's length: the mean of u over the training share for each of the p features, then the mean of u squared, then a 1, and
zeros. They are masked and uploaded like an update. Means rather than sums, so that the vector says nothing of the number of
samples; the 1 is divided by at the end, so that noise on the vector's length cancels. Clipping bounds one sample's part, and
gives all coordinates one unit: a mask that mixes coordinates has an error in float32 that grows with the largest.

Example: one feature from 0 to 10 in which the device has the values 0 and 10.

    >>> import numpy as np
    >>> from edge_client.learning.statistics import scale_from, statistics_of
    >>> from shoal.task.data_declaration import DataDeclaration
    >>> data = DataDeclaration(features=("x",), low=(0,), high=(10,), standardise="federated")
    >>> found = statistics_of(np.array([[0], [10]], np.float32), data, 4)
    >>> found.tolist()
    [0.0, 1.0, 1.0, 0.0]
    >>> scale_from(found, data, bytes(16)).deviations
    (5.0,)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edge_client.storage.scales import Scale
from shoal.errors import DataError, IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shoal.task.data_declaration import DataDeclaration
    from shoal.types import Float32Vector

LEAST_DEVIATION: Final = 1e-3
"""Smallest deviation, in halves of the declared range: below it is rounding of the masks, about 1e-6 of the vector."""

TOLERANCE: Final = 1e-3
"""Distance by which a mean of statistics may be outside of its bounds: rounding of masks and of weights."""

LEAST_COUNT: Final = 0.2
"""Smallest last entry of a mean: with noise on the length of each vector it is 1 to within a few deviations of up to 0.2."""


def statistics_of(x: NDArray[Any], data: DataDeclaration, length: int) -> Float32Vector:
    """Return the statistics of a training share, (length,) float32.

    Args:
        x: (n, ...), float32; missing values are nan.
        data: declares bounds for each of the p values of a sample.
        length: coordinates of an update, at least 2 p + 1.

    Raises:
        DataError: a feature has no value in the share.
    """
    centre, half = _range(data)
    flat = x.reshape(len(x), -1)
    width = flat.shape[1]
    found = np.zeros(length, np.float32)
    for at in range(width):
        column = flat[:, at].astype(np.float64)
        column = column[~np.isnan(column)]
        if not len(column):
            raise DataError(
                f"column {data.features[at]!r} has no value in the training share",
                hint="federated standardisation needs some values of each feature on every device",
            )
        u = np.clip((column - centre[at]) / half[at], -1.0, 1.0)
        found[at], found[width + at] = u.mean(), (u**2).mean()
    found[2 * width] = 1.0
    return found


def scale_from(mean: Float32Vector, data: DataDeclaration, run_id: bytes) -> Scale:
    """Return the scale that the fleet's mean of statistics gives.

    Args:
        mean: (d,), float32, unmasked.
        data: the declaration by which the statistics were made.
        run_id: the run.

    Raises:
        IntegrityError: no statistics of devices have such a mean.
    """
    centre, half = _range(data)
    width = len(centre)
    values = mean[: 2 * width + 1].astype(np.float64)
    count = values[2 * width]
    if not (np.isfinite(values).all() and count >= LEAST_COUNT):
        raise IntegrityError("the fleet's statistics have no count of devices", hint="the owner should start a new run")
    first, second = values[:width] / count, values[width : 2 * width] / count
    if (np.abs(first) > 1 + TOLERANCE).any() or (second < first**2 - TOLERANCE).any() or (second > 1 + TOLERANCE).any():
        raise IntegrityError(
            "the fleet's statistics are outside of their bounds",
            hint="a device or the aggregator has changed them: the owner should start a new run",
        )
    deviations = np.maximum(np.sqrt(np.maximum(second - first**2, 0.0)), LEAST_DEVIATION)
    return Scale(run_id, tuple((centre + half * first).tolist()), tuple((half * deviations).tolist()))


def _range(data: DataDeclaration) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the centre and half of the width of each feature's bounds, (p,)."""
    low, high = np.array(data.low), np.array(data.high)
    return (low + high) / 2, (high - low) / 2
