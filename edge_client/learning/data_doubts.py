"""Doubts about a device's samples before anything is trained.

They are about columns that do not vary, or are of very different or huge size, about numbers that seem to stand for missing
values, and about labels of one class. Each doubt is one sentence and ends with the thing to do.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edge_client.learning.evaluation import majority_share
from edge_client.learning.standardisation import CONSTANT, moments

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    from edge_client.learning.data import Dataset
    from edge_client.storage.finished_models import FinishedModel
    from shoal.task.manifest import TaskManifest

UNSCALED_RATIO: Final = 100.0
"""Features are unscaled if the largest deviation is above this multiple of the median one: plain SGD has one step size for all.

Small deviations do no harm: the edges of scanned digits hardly vary, and training ignores them."""

HUGE: Final = 1e6
"""Features that are not standardised are huge above this: a step of plain SGD is as long as the features are. Of others,
a value is huge if it is as many times the median one."""

STAND_IN_SHARE: Final = 0.02
"""A number may stand for a missing value if at least this share of a column's values has it, and three do, and at most half."""

STAND_IN_DISTANCE: Final = 5.0
"""Such a number lies this many times the range of all other values beyond them, as -999 does beyond 0 to 100."""

MOST_UNITS: Final = 10.0
"""Targets are unscaled if their mean and deviation together exceed so many of the task's units, or it is a fraction of one."""

MOST_NAMED: Final = 5
IMAGE_RANK: Final = 2
"""Samples with more dimensions are images: corners that are always black are no fault."""


def doubts(samples: Dataset, manifest: TaskManifest) -> tuple[str, ...]:
    """Return the doubts about samples in the units of the data; whole numbers and images have none about features.

    Columns without names and scale may be pixels, of which some are always black: that they don't vary is no doubt.
    """
    about_y = target_doubt(samples.y, manifest) if manifest.kind == "regression" else class_doubt(samples.y, manifest)
    found = [about_y] if about_y else []
    if manifest.input.dtype != "float32" or len(manifest.input.shape) >= IMAGE_RANK or len(samples) < 2:
        return tuple(found)
    sums, _, counts = moments(samples.x, np.zeros(1))
    means = sums / np.maximum(counts, 1)
    _, squares, _ = moments(samples.x, means)
    deviations = np.sqrt(squares / np.maximum(counts, 1))
    varies = deviations > CONSTANT * np.abs(means)
    if not counts.all():
        empty = [_name(int(at), manifest) for at in np.flatnonzero(counts == 0)]
        found.append(f"{_listed(empty)} no value in any sample: an empty column teaches nothing; check the file")
    table = bool(manifest.data.features) or manifest.data.standardise != "off"
    if table and not varies[counts > 0].all():
        constant = [_name(int(at), manifest) for at in np.flatnonzero(~varies & (counts > 0))]
        found.append(
            f"{_listed(constant)} the same value in every sample: a constant column teaches nothing; check the file"
        )
    # Pixels are often black and never below it.
    least = samples.x.min(axis=0)
    negative = varies & (least < 0) & ((samples.x == least).sum(axis=0) > 2)
    for at in np.flatnonzero(varies if table else negative):
        value = _stand_in(samples.x[:, at])
        if value is not None:
            found.append(
                f"{_name(int(at), manifest)} has {value:g} in many samples, far from all other values: if it stands for a "
                "missing value, leave these cells empty"
            )
    largest = float(np.nanmax(np.abs(samples.x))) if counts.any() else 0.0
    if manifest.data.standardise == "off" and largest > HUGE:
        found.append(
            f"the features have values of up to {largest:.0e}, and training will likely fail; compile the task with "
            "--standardise, or scale the features"
        )
    elif manifest.data.standardise != "off":
        about_size = outlier_doubt(samples.x, manifest)
        found += [about_size] if about_size else []
    elif varies.any():
        ordered = np.sort(deviations[varies])
        ratio = ordered[-1] / ordered[(len(ordered) - 1) // 2]
        if ratio > UNSCALED_RATIO:
            found.append(
                f"the features are unscaled: the deviation of {_name(int(deviations.argmax()), manifest)} is {ratio:.0f} times "
                "the median one, and training will likely fail; compile the task with --standardise, or scale the features"
            )
    return tuple(found)


def outlier_doubt(x: NDArray[np.float32], manifest: TaskManifest) -> str:
    """Return the doubt about columns (n, p) with a value so far out that standardisation makes all others the same."""
    sizes = np.abs(np.where(np.isnan(x), 0.0, x))
    usual = np.array([np.median(column[column > 0]) if column.any() else 0.0 for column in sizes.T])
    found = [_name(int(at), manifest) for at in np.flatnonzero(sizes.max(axis=0) > HUGE * usual)]
    if not found:
        return ""
    return f"{_listed(found)} a value over a million times the usual: all others look the same beside it; mend or remove it"


def class_doubt(y: NDArray[Any], manifest: TaskManifest) -> str:
    """Return the doubt about labels that are all of one class; empty if they are not."""
    if len(y) < 2 or manifest.kind != "classification" or (y != y[0]).any():
        return ""
    label = manifest.data.labels[int(y[0])] if manifest.data.labels else int(y[0])
    return f"every sample has the label {label!r}: an accuracy of 100 % means nothing here; check the labels"


def _stand_in(column: NDArray[np.float32]) -> float | None:
    """Return the number that seems to stand for missing values in a column (n,): the least or the largest; None without one."""
    values = column[~np.isnan(column)].astype(np.float64)
    least, most = values.min(), values.max()
    for value in (least, most):
        others = values[values != value]
        same = len(values) - len(others)
        if not max(3, STAND_IN_SHARE * len(values)) <= same <= len(values) / 2:
            continue
        low, high = others.min(), others.max()
        if high > low and (low - value if value == least else value - high) > STAND_IN_DISTANCE * (high - low):
            return float(value)
    return None


def target_doubt(y: NDArray[Any], manifest: TaskManifest) -> str:
    """Return the doubt about numbers ``y`` that are far from the task's unit; empty if they are near it, or all equal."""
    centre, unit = manifest.data.target_scale
    mean, deviation = float(y.mean(dtype=np.float64)), float(y.std(dtype=np.float64))
    if not deviation or unit / MOST_UNITS <= deviation <= MOST_UNITS * unit - abs(mean - centre):
        return ""
    return (
        f"the targets have the mean {mean:.3g} and the deviation {deviation:.3g}, and the task expects about {centre:.3g} and "
        f"{unit:.3g}: training will likely fail; compile the task with --target, the range in which most of them lie"
    )


def no_better_doubt(accuracy: float, majority: float) -> str:
    """Return the doubt about a finished model that is no better than the most common class; empty if it is better."""
    if accuracy > majority:
        return ""
    return (
        f"the finished model is right in {accuracy:.1%} of the validation share, and the most common label in "
        f"{majority:.1%}: it has learned nothing; look at the data with `shoal-edge doctor --data`, then train longer or with "
        "another step size"
    )


def model_doubt(model: FinishedModel | None, task: bytes, y: NDArray[Any]) -> str:
    """Return the doubt about the finished model that answers; empty if it is of another task, or better than a guess.

    Args:
        model: None if the device has none.
        task: digest of the task to which the samples belong.
        y: labels of the validation share.
    """
    if model is None or model.task != task or model.validation.accuracy is None:
        return ""
    return no_better_doubt(model.validation.accuracy, majority_share(y))


def _name(column: int, manifest: TaskManifest) -> str:
    names = manifest.data.features
    return f"column {names[column]!r}" if names else f"value {column}"


def listed(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _listed(names: Sequence[str]) -> str:
    return f"{listed(names)} {'has' if len(names) == 1 else 'have'}"
