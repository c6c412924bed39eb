"""Doubts about a device's samples before anything is trained: columns that do not vary, and columns of very different size.

Each doubt is one sentence and ends with the thing to do.
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

MOST_UNITS: Final = 10.0
"""Targets are unscaled if their mean and deviation together exceed so many of the task's units, or it is a fraction of one."""

MOST_NAMED: Final = 5
IMAGE_RANK: Final = 2
"""Samples with more dimensions are images: corners that are always black are no fault."""


def doubts(samples: Dataset, manifest: TaskManifest) -> tuple[str, ...]:
    """Return the doubts about samples in the units of the data; whole numbers and images have none about features."""
    found = [doubt] if manifest.kind == "regression" and (doubt := target_doubt(samples.y, manifest)) else []
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
    if not varies[counts > 0].all():
        constant = [_name(int(at), manifest) for at in np.flatnonzero(~varies & (counts > 0))]
        found.append(
            f"{_listed(constant)} the same value in every sample: a constant column teaches nothing; check the file"
        )
    if manifest.data.standardise == "off" and varies.any():
        ordered = np.sort(deviations[varies])
        ratio = ordered[-1] / ordered[(len(ordered) - 1) // 2]
        if ratio > UNSCALED_RATIO:
            found.append(
                f"the features are unscaled: the deviation of {_name(int(deviations.argmax()), manifest)} is {ratio:.0f} times "
                "the median one, and training will likely fail; compile the task with --standardise, or scale the features"
            )
    return tuple(found)


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
