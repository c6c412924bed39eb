"""Standardisation: each value of a sample less its mean, divided by its standard deviation.

The scale is the device's own (`local_scale`), or the fleet's. A value that does not vary has the deviation 1, a missing value
is 0, the mean. Standardised values are limited to plus and minus LARGEST, so that one absurd value can't make a gradient
infinite.

Example: two features of very different size.

    >>> import numpy as np
    >>> from edge_client.learning.standardisation import local_scale, standardised
    >>> x = np.array([[1, 1000], [3, 3000]], np.float32)
    >>> standardised(x, local_scale(x, bytes(16))).tolist()
    [[-1.0, -1.0], [1.0, 1.0]]
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edge_client.learning.data import Dataset, DataSplits
from edge_client.storage.scales import Scale, Scales
from shoal.errors import IntegrityError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from shoal.task.manifest import TaskManifest

LARGEST: Final = 1e4
"""Largest standardised value, in deviations."""

CONSTANT: Final = 1e-6
"""A value varies if its deviation is above this share of its mean: float32 has 24 bits, so less may be rounding."""

_BLOCK: Final = 1 << 20
"""Values that are converted to float64 at a time."""


def local_scale(x: NDArray[Any], run_id: bytes) -> Scale:
    """Return the scale of a device's own samples.

    Args:
        x: (n, ...), float32; missing values are nan.
        run_id: the run that will use it.
    """
    sums, _, counts = moments(x, np.zeros(1))
    seen = np.maximum(counts, 1)
    means = sums / seen
    # Around the means: squares of large values with small deviations would cancel.
    _, squares, _ = moments(x, means)
    return scale_of(run_id, means, squares / seen)


def moments(
    x: NDArray[Any], centre: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]]:
    """Return the sum, the sum of squares and the number of the values that are not missing, (p,) each, in float64.

    Args:
        x: (n, ...), float32.
        centre: (p,) or (1,), subtracted from the values before.
    """
    flat = x.reshape(len(x), -1)
    width = flat.shape[1]
    sums, squares, counts = np.zeros(width), np.zeros(width), np.zeros(width, np.int64)
    for rows in _blocks(len(flat), width):
        block = np.subtract(flat[rows], centre, dtype=np.float64)
        missing = np.isnan(block)
        if missing.any():
            block[missing] = 0.0
        sums += block.sum(axis=0)
        squares += np.square(block, out=block).sum(axis=0)
        counts += len(block) - missing.sum(axis=0)
    return sums, squares, counts


def scale_of(run_id: bytes, means: NDArray[np.float64], variances: NDArray[np.float64]) -> Scale:
    """Return the scale of these means and variances, (p,); a variance may be slightly below 0 by rounding."""
    deviations = np.sqrt(np.maximum(variances, 0.0))
    deviations[deviations <= CONSTANT * np.abs(means)] = 1.0
    return Scale(run_id, tuple(means.tolist()), tuple(deviations.tolist()))


def standardised(x: NDArray[Any], scale: Scale) -> NDArray[np.float32]:
    """Return samples in a scale's units, of the same shape, float32; missing values are 0.

    Args:
        x: (n, ...), float32, with as many values a sample as the scale has.
        scale: from `local_scale`, or of the fleet.
    """
    means, deviations = np.array(scale.means), np.array(scale.deviations)
    flat = x.reshape(len(x), -1)
    out = np.empty(flat.shape, np.float32)
    for rows in _blocks(*flat.shape):
        block = (flat[rows].astype(np.float64) - means) / deviations
        np.nan_to_num(block, copy=False, nan=0.0)
        out[rows] = np.clip(block, -LARGEST, LARGEST)
    return out.reshape(x.shape)


def prepared(splits: DataSplits, scale: Scale | None) -> DataSplits:
    """Return all three shares in a scale's units; without one, the shares as they are."""
    if scale is None:
        return splits
    shares = (splits.train, splits.validation, splits.test)
    return DataSplits(*(Dataset(standardised(share.x, scale), share.y) for share in shares))


def rescaled(share: Dataset, own: Scale | None, other: Scale | None) -> Dataset:
    """Return a share, standardised by ``own``, in the units of another run's scale; None for the data's own units."""
    if own == other or own is None or other is None:
        return share
    flat = share.x.reshape(len(share), -1).astype(np.float64) * np.array(own.deviations) + np.array(own.means)
    return Dataset(standardised(flat.reshape(share.x.shape), other), share.y)


def scale_for(manifest: TaskManifest, scales: Scales, run_id: bytes) -> Scale | None:
    """Return the stored scale of a run; None if its task does not standardise.

    Raises:
        IntegrityError: the task standardises, and the scale is missing, damaged, or of another number of values.
    """
    if manifest.data.standardise == "off":
        return None
    scale = scales.load(run_id)
    if scale is None or len(scale.means) != manifest.width:
        raise IntegrityError(
            "the device has no scale of the run whose model is asked for",
            hint="let the device take part in the next run; `shoal-edge models` lists the finished ones",
        )
    return scale


def _blocks(n: int, width: int) -> list[slice]:
    step = max(1, _BLOCK // max(width, 1))
    return [slice(at, at + step) for at in range(0, n, step)]
