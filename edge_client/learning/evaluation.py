"""Figures of a model on labelled samples, beside those of a guess that looks at no sample.

For classes: accuracy, each class's counts, and the share of the most common class, which a model that has learned nothing
reaches. For numbers: the mean squared and absolute error, and those of the mean label.

Example: a model that answers one class for all samples is as good as the majority.

    >>> import numpy as np
    >>> from edge_client.learning.evaluation import of_classes
    >>> found = of_classes(np.array([1, 1, 1]), np.array([1, 0, 1]), 2)
    >>> (round(found.accuracy, 2), round(found.majority, 2), found.is_no_better)
    (0.67, 0.67, True)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_CONFUSED: Final = 1000
"""Most classes for which a table of counts is made: it has the square of that."""


@dataclass(frozen=True, slots=True)
class ClassFigures:
    """Figures of a classifier.

    Attributes:
        samples: labels seen.
        correct: labels predicted right.
        common: the most common class; majority: its share.
        confusion: row i, column j: samples of class i that were taken for class j; None for more than MOST_CONFUSED classes.
    """

    samples: int
    correct: int
    common: int
    majority: float
    confusion: tuple[tuple[int, ...], ...] | None

    @property
    def accuracy(self) -> float:
        """Share of labels predicted right."""
        return self.correct / self.samples

    @property
    def is_no_better(self) -> bool:
        """Whether the most common class alone does as well."""
        return self.accuracy <= self.majority

    def document(self, names: tuple[str, ...] = ()) -> dict[str, Any]:
        """Return the figures for JSON output; ``names`` are the classes', if the task names them."""
        return {
            "samples": self.samples,
            "accuracy": self.accuracy,
            "majority": {"label": name_of(self.common, names), "accuracy": self.majority},
            "labels": list(names) or None,
            "confusion": None if self.confusion is None else [list(row) for row in self.confusion],
        }


@dataclass(frozen=True, slots=True)
class ErrorFigures:
    """Figures of a regression model.

    Attributes:
        samples: numbers predicted.
        squared, absolute: mean errors.
        mean_squared, mean_absolute: those of the samples' mean label.
    """

    samples: int
    squared: float
    absolute: float
    mean_squared: float
    mean_absolute: float

    @property
    def is_no_better(self) -> bool:
        """Whether the mean label does as well."""
        return self.squared >= self.mean_squared

    def document(self) -> dict[str, Any]:
        """Return the figures for JSON output."""
        return {
            "samples": self.samples,
            "mean_squared_error": self.squared,
            "mean_absolute_error": self.absolute,
            "mean_label": {"mean_squared_error": self.mean_squared, "mean_absolute_error": self.mean_absolute},
        }


def of_classes(answers: NDArray[np.int64], y: NDArray[Any], classes: int) -> ClassFigures:
    """Return the figures of answers for labels ``y``, both of one shape, each in 0..classes-1."""
    truth, given = y.ravel(), answers.ravel()
    counts = np.bincount(truth, minlength=classes)
    confusion = None
    if classes <= MOST_CONFUSED:
        table = np.bincount(truth * classes + given, minlength=classes * classes).reshape(classes, classes)
        confusion = tuple(map(tuple, table.tolist()))
    common = int(counts.argmax())
    return ClassFigures(len(truth), int((truth == given).sum()), common, int(counts[common]) / len(truth), confusion)


def of_numbers(outputs: NDArray[Any], y: NDArray[Any]) -> ErrorFigures:
    """Return the figures of outputs for labels ``y``, both of one shape."""
    truth, given = y.astype(np.float64).ravel(), outputs.astype(np.float64).ravel()
    off, spread = given - truth, truth - truth.mean()
    return ErrorFigures(
        len(truth),
        float((off**2).mean()),
        float(np.abs(off).mean()),
        float((spread**2).mean()),
        float(np.abs(spread).mean()),
    )


def majority_share(y: NDArray[Any]) -> float:
    """Return the share of the most common label of ``y``, int64."""
    _, counts = np.unique(y, return_counts=True)
    return float(counts.max() / y.size)


def name_of(number: int, names: tuple[str, ...]) -> str:
    """Return the name of a class; its number if the task names none."""
    return names[number] if number < len(names) else str(number)
