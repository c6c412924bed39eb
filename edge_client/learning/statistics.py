"""A device's statistics for federated standardisation, and the scale that follows from the fleet's mean of them.

A value x with the declared bounds a and b becomes u = (2 x - a - b) / (b - a), clipped to [-1, 1]. The statistics are a vector of
the model's length: the mean of u over the training share for each of the p features, then the mean of u squared, then a 1, and
zeros. They are multiplied by a dense secret matrix (`crypto.mask.dense`), and masked and uploaded like an update. Means rather
than sums, so that the vector says nothing of the number of samples; the 1 is divided by at the end, so that noise on the vector's
length cancels. Clipping bounds one sample's part, and gives all coordinates one unit: a mask that mixes coordinates has an error
in float32 that grows with the largest.

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

from edge_client.learning.data_doubts import listed
from edge_client.learning.norm_noise import CLIP
from edge_client.storage.scales import Scale
from shoal import limits
from shoal.errors import DataError, IntegrityError
from shoal.protocol.messages import STATISTICS_MODEL

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from edge_client.models.states import ModelState
    from shoal.protocol.documents import RunPlan
    from shoal.task.data_declaration import DataDeclaration
    from shoal.types import Float32Vector

LEAST_DEVIATION: Final = 1 / 16
"""Smallest deviation, in halves of the declared range. So no device can stretch a feature, by false statistics, to more than 32
deviations from one bound to the other; and no honest scale changes where the bounds are at most 32 deviations apart."""

TOLERANCE: Final = 1e-3
"""Distance by which a mean of statistics may be outside of its bounds: rounding of masks and of weights."""

COUNT: Final = "the count of devices"
"""Name of the last entry: 1 but for noise on the length of vectors, and for long vectors that the aggregator has shortened."""

SHORTENED: Final = 1 / 4
"""Most that shortened vectors take off the count: where half of the weight is of vectors that lose half of their length."""


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


def scale_from(
    mean: Float32Vector,
    data: DataDeclaration,
    run_id: bytes,
    noise: float = limits.MAX_NORM_NOISE,
    *,
    of_cluster: bool = False,
) -> Scale:
    """Return the scale that a mean of statistics of the fleet or of a cluster gives, whatever a device has made of it.

    A mean is limited to the declared bounds, a deviation to `LEAST_DEVIATION` and the largest one that values with that mean and
    those bounds can have. What was out of its limits is named in ``doubted``.

    Args:
        mean: (d,), float32, unmasked.
        data: the declaration by which the statistics were made.
        run_id: the run.
        noise: relative standard deviation of the noise on the length of each vector.
        of_cluster: whether it is a cluster's, whose features may well vary less than the fleet's: no doubt then.

    Raises:
        IntegrityError: a figure is not finite, which an aggregator refuses from a device; or all are zero, as the model of the
            statistics is before their round.
    """
    centre, half = _range(data)
    width = len(centre)
    values = mean[: 2 * width + 1].astype(np.float64)
    if not (np.isfinite(values).all() and values.any()):
        raise IntegrityError(
            "the fleet has no statistics yet, or not finite ones", hint="the owner should start a new run"
        )
    count = np.clip(values[2 * width], (1 - SHORTENED) * (1 - CLIP * noise), 1 + CLIP * noise)
    first = np.clip(values[:width] / count, -1.0, 1.0)
    variances = values[width : 2 * width] / count - first**2
    least, most = LEAST_DEVIATION**2, np.maximum(1 - first**2, LEAST_DEVIATION**2)
    lowest = -TOLERANCE if of_cluster else least
    false = (np.abs(values[:width] / count) > 1 + TOLERANCE) | (variances < lowest) | (variances > most + TOLERANCE)
    doubted = [f"feature {data.features[at]!r}" for at in np.flatnonzero(false)]
    if abs(values[2 * width] - count) > TOLERANCE:
        doubted.append(COUNT)
    deviations = half * np.sqrt(np.clip(variances, least, most))
    return Scale(run_id, tuple((centre + half * first).tolist()), tuple(deviations.tolist()), tuple(doubted))


def scale_of_state(state: ModelState, data: DataDeclaration, plan: RunPlan) -> Scale:
    """Return the scale that a run's statistics of the fleet or of a cluster give; raises as `scale_from`."""
    of_cluster = state.id.model != STATISTICS_MODEL
    return scale_from(state.theta, data, plan.run_id, plan.recipe.norm_noise, of_cluster=of_cluster)


def scale_doubt(scale: Scale | None) -> str:
    """Return the doubt about a fleet's scale, one sentence; empty if its statistics were within their limits."""
    if scale is None or not scale.doubted:
        return ""
    return (
        f"the fleet's statistics are out of their limits for {listed(scale.doubted)}: the declared bounds are too far apart, or "
        "a device has sent false ones; training goes on with the nearest figures"
    )


def _range(data: DataDeclaration) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the centre and half of the width of each feature's bounds, (p,)."""
    low, high = np.array(data.low), np.array(data.high)
    return (low + high) / 2, (high - low) / 2
