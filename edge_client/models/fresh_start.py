"""A starting model for training alone, drawn like the run's origin without storing the origin.

A device must not keep the origin. Origin and first state together give the clear mean of the first round, and with it a thief
who has recorded the traffic could find that round's permutation. So the device stores the mean and the spread of each tensor
of the origin, two figures with two digits each, and draws a model with the same ones after the run.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from shoal.digests import shake_256
from shoal.errors import IntegrityError
from shoal.protocol.codec import message

if TYPE_CHECKING:
    from shoal.types import Float32Vector

DIGITS: Final = 2
"""Significant digits of the stored figures: more would give away the values of a tensor of one or two coordinates."""
BLOCK: Final = 1 << 17
"""Coordinates worked on at a time in float64."""
_LABEL: Final = b"shoal/fresh-start/1"


@message(78)
@dataclass(frozen=True, slots=True)
class TensorFigures:
    """Mean and standard deviation of each of a model's tensors, in the order of the task's parameters."""

    means: tuple[float, ...]
    spreads: tuple[float, ...]


def figures_of(theta: Float32Vector, lengths: Sequence[int]) -> TensorFigures:
    """Return the figures of a model (d,) float32 whose tensors have these lengths, which sum to d."""
    means, spreads, at = [], [], 0
    for length in lengths:
        values = theta[at : at + length]
        blocks = [values[start : start + BLOCK] for start in range(0, length, BLOCK)]
        mean = sum(block.sum(dtype=np.float64) for block in blocks) / length
        squares = sum(np.square(block - mean, dtype=np.float64).sum() for block in blocks)
        means.append(_rounded(float(mean)))
        # A constant tensor stays constant: its float64 standard deviation may be a rounding error above 0.
        spreads.append(0.0 if values.min() == values.max() else _rounded(math.sqrt(squares / length)))
        at += length
    return TensorFigures(tuple(means), tuple(spreads))


def draw(figures: TensorFigures, lengths: Sequence[int], seed: int) -> Float32Vector:
    """Return a model (d,) float32 whose tensors are uniform with the figures' means and spreads.

    The draw is the same on every platform: SHAKE-256 words, no numpy stream.

    Raises:
        IntegrityError: the figures are of another task.
    """
    if not len(figures.means) == len(figures.spreads) == len(lengths):
        raise IntegrityError(f"figures of {len(figures.means)} tensors for a task of {len(lengths)}")
    words = np.frombuffer(shake_256(_LABEL + f"/{seed}".encode(), 4 * sum(lengths)), "<u4")
    drawn, at = np.empty(len(words), np.float32), 0
    for mean, spread, length in zip(figures.means, figures.spreads, lengths, strict=True):
        for start in range(at, at + length, BLOCK):
            part = slice(start, min(start + BLOCK, at + length))
            unit = words[part] / 2.0**31 - 1.0
            # A uniform variable on [-1, 1] has the standard deviation 1 / sqrt(3).
            drawn[part] = mean + math.sqrt(3.0) * spread * unit
        at += length
    return drawn


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}")
